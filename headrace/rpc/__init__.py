"""gRPC and ZeroMQ between the processes of a job, and the client of a running job."""
