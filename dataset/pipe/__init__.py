"""Runs segments of events through the pipe command, and returns their samples and rejections.

`command` says what is started, `process` talks to it, `multislot` and `arrow` are the two protocols. `pool` runs
several commands in parallel, with retries. `dataset.formats.multislot_parser` and `dataset.formats.arrow_columns` parse
the samples.
"""
