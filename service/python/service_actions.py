"""The actions of a service as methods, by name. service_actions.pyi, which docs/generate.py makes out of the OpenAPI
document, tells type checkers and editors their parameters and results; at run time service_connection finds each in the
document of the service that is asked."""

from functools import partial


class ServiceActions:
    """A method for each action of a service: `getJob` is `get_job`."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._carry_out, name)


class AsyncServiceActions(ServiceActions):
    """The same, to be awaited."""
