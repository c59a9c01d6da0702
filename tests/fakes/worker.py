"""A worker that follows the script in its configuration, for tests: `python -m tests.fakes.worker --config FILE`.

`do` is a list of verbs with their arguments, done in order.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from headrace.launcher_contact import LauncherContact
from headrace.lifecycle import end_with_parent
from headrace.rpc.rendezvous import RendezvousClient

config = json.loads(Path(sys.argv[2]).read_text())
end_with_parent()
draining = threading.Event()


def contact() -> LauncherContact:
    return LauncherContact(**config["launcher"])


def status() -> dict:
    return {"job": "fake", "state": "training", "shards": config.get("shards")}


for verb, *arguments in config["do"]:
    if verb == "in_generation":  # then only
        generation, verb, *arguments = arguments
        if generation != config["generation"]:
            continue
    match verb:
        case "note_pid":  # so that a test can look for orphans
            with Path(config["pids"]).open("a") as file:
                file.write(f"{os.getpid()}\n")
        case "spawn":  # a pipe command, so to say: its standard input is not ours
            child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
            with Path(config["pids"]).open("a") as file:
                file.write(f"{child.pid}\n")
        case "address":
            RendezvousClient(contact()).announce("127.0.0.1:1")
        case "serve":
            from headrace.rpc.role import serve_role

            told = {**status(), **(arguments[0] if arguments else {})}
            message = bytes.fromhex(arguments[1]) if len(arguments) > 1 else b""
            calls = {"status": lambda told=told: told, "exchange": lambda _, message=message: message}
            server = serve_role(drain=draining.set, secret=config["secret"], socket=Path(config["socket"]), **calls)
            RendezvousClient(contact()).announce(server.address)
        case "ignore_term":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "write":
            Path(arguments[0]).write_text(arguments[1])
        case "say":
            print(*arguments, flush=True)
        case "say_config":
            print(json.dumps(config[arguments[0]]), flush=True)
        case "await_drain":
            draining.wait()
        case "await_file":
            while not Path(arguments[0]).exists():
                time.sleep(0.01)
        case "kill_self":
            os.kill(os.getpid(), arguments[0])
        case "sleep":
            time.sleep(1000)
        case "exit":
            sys.stdout.flush()
            os._exit(arguments[0])
