"""Blobs by key, in a folder of this machine or in an object store: the one seam under mirror and exports.

    store.py    the protocol, and `open_blobs`, which picks the implementation by address
    folder.py   a folder of this machine
    s3.py       a bucket of S3 or of a server that speaks its protocol
    writer.py   a blob that is written piece by piece
    retry.py    repeats a call that fails, within its deadline
    errors.py   the errors of all of these

Imports no torch: the control plane reads mirrors and exports, too.
"""
