"""The tabs of a job's page: their titles by their name in the address."""

NOW = "learning"
TABS = {
    NOW: "Learning and stream",
    "tables": "Tables",
    "guards": "Guards",
    "versions": "Commits and exports",
    "output": "Output",
    "deadletters": "Dead letters",
    "operations": "Operations",
}
