"""The size of a job: memory, disk, wire and cores for so many events and ids, from a measured sample."""
