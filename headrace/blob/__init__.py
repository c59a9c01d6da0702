"""Blobs by key, in a folder of this machine or in an object store: the one seam under commits, mirror and exports.

    blob_store.py      what every store has, and `open_blobs`, which picks the kind of store by address
    store_address.py   addresses of stores as users write them
    folder.py          a folder of this machine
    bucket.py          a bucket in an object store; s3.py, gcs.py and azure.py make the client of one service
    blob_writer.py     a blob that is written piece by piece
    blob_retry.py      repeats a call that fails, within its deadline
    blob_errors.py     the errors of all of these

Imports no torch: shards and the control plane use it, too.
"""
