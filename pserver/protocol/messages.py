"""The service of shard.proto, the version of the protocol, and tables as text.

pserver.protocol.frames has the messages of the data plane.
"""

import json
from collections.abc import Mapping

from headrace.pserver.config import TableSection, Wire
from headrace.pserver.proto import shard_pb2 as pb

FORMAT = 8
"""Version of the protocol, on gRPC and on the data plane; both ends must have the same."""
SERVICE = pb.DESCRIPTOR.services_by_name["Shard"]
"""The calls of shard.proto."""


def tables_json(tables: Mapping[str, TableSection], wire: Wire = Wire.FLOAT32) -> bytes:
    """The sections of the tables, and how their rows travel, as text: equal ones give equal text."""
    sections = {name: section.model_dump(mode="json") for name, section in tables.items()}
    text = json.dumps(sections, sort_keys=True)
    return (text if wire is Wire.FLOAT32 else f"{text} {wire}").encode()
