"""Reading and the pipe on machines of their own: readers feed the trainers of a job with samples in columns."""
