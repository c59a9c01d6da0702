"""The tabs of a job's page: their titles by their name in the address."""

NOW = "learning"
TABS = {
    NOW: "Learning and stream",
    "tables": "Tables",
    "rows": "Rows",
    "try": "Try it",
    "workers": "Workers",
    "guards": "Guards",
    "settings": "Settings",
    "versions": "Commits and exports",
    "output": "Logs",
    "deadletters": "Dead letters",
    "operations": "Operations",
}
