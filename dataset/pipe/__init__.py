"""Events through the pipe command: one segment in, its samples and rejections out.

`command` says what is started, `process` talks to it, `multislot` and `arrow` are the two protocols, `pool` runs
several side by side and tries again. What a sample is, is `dataset.multislot`'s and `dataset.arrow`'s business.
"""
