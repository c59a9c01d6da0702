"""`headrace demo`: a job that learns from a simulated stream, beside a frozen twin, in a service of their own."""
