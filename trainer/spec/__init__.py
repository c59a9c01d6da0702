"""The logged spec: defaults by set, changes of a job file, rules of slots."""
