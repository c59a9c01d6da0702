"""The workers of a job on this machine: plan, launcher, supervision, the job's store."""
