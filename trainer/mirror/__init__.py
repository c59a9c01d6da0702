"""The mirror: a copy of commits and log in an object store, from which a job restarts on an empty machine.

    files/<sha256>               immutable content, stored once for all commits that name it
    commits/<commit name>.json   the manifest, as in the commit's folder; the commit exists once this does
    log/<file name>              files of the job's log, as of the last upload

Imports no torch: the control plane reads mirrors, too.
"""
