"""The control plane: the job spec, the launcher, the command line, the API. Workers never import it."""
