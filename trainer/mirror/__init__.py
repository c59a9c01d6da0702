"""The mirror: a copy of commits and log in an object store, from which a job starts again on an empty machine.

    files/<sha256>               immutable content, each once, however many commits name it
    commits/<commit name>.json   the manifest as it is in the commit's folder; a commit is there once this is
    log/<file name>              files of the job's log, as of the last upload

Imports no torch: the control plane reads mirrors, too.
"""
