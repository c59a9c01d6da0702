"""An example of a request for each route, as a command of curl, made from the OpenAPI document.

The bodies are the examples that the models of bodies have; names in addresses are those of the clicks example.
"""

import json
import re
from typing import Any

ADDRESS = "http://127.0.0.1:8080"
NAMES = {
    "job": "clicks",
    "table": "default",
    "slot": "user",
    "sign": "17",
    "stream": "serving",
    "timeline": "t1",
    "id": "0197a2c4",
    "token": "k3v9",
    "name": "t1-0000000012-g1",
    "file": "pass-000000000002-rank-0.jsonl",
}
"""By parameter."""
OF_EXPORTS = {"name": "0000000012-base", "file": "manifest.json"}
"""As above, of routes below /exports/."""
REFS = "#/components/schemas/"


def curl(method: str, path: str, told: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The command, over several lines."""
    names = NAMES | (OF_EXPORTS if "/exports/" in path else {})
    wanted = [each for each in told.get("parameters", ()) if each.get("required")]
    query = "&".join(f"{each['name']}={names[each['name']]}" for each in wanted if each["in"] == "query")
    url = ADDRESS + re.sub(r"{(\w+)}", lambda found: names[found[1]], path) + (f"?{query}" if query else "")
    parts = [f"curl{'' if method == 'get' else f' -X {method.upper()}'} '{url}'"]
    if told.get("x-role", "none") != "none":
        parts.append('-H "Authorization: Bearer $TOKEN"')
    if "428" in told["responses"]:
        parts.append("""-H 'If-Match: "3"'""")
    if (body := example_of(path, told, schemas)) is not None:
        parts += ["-H 'Content-Type: application/json'", f"-d '{json.dumps(body)}'"]
    return " \\\n  ".join(parts)


def example_of(path: str, told: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """The body of the request; None: it has none. Of two examples, the second is for routes without a job."""
    for content in told.get("requestBody", {}).get("content", {}).values():
        for schema in content["schema"].get("anyOf", [content["schema"]]):
            if "$ref" in schema:
                examples = schemas[schema["$ref"].removeprefix(REFS)]["examples"]
                return examples[0 if "{job}" in path else -1]
    return None
