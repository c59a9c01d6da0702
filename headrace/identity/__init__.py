"""Identity of the processes of a job on several machines: its authority, certificates, join token."""
