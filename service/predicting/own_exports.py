"""Finds the job's own export of a version, where no commit of that version is left."""

from millrace.errors import SpecError
from service.exports.listing import opened
from service.spec import LoadedJob


def address_of(job: LoadedJob, version: str) -> str | None:
    """The address of the only complete export of `version`, from the newest timeline that has one; None: no export.

    Raises SpecError where several streams have one, Unavailable where a destination does not answer.
    """
    found: dict[str, str] = {}
    for name in job.spec.exports:
        with opened(job, name) as [stream]:
            paths = [each.path for each in stream.present() if each.complete and each.order[1] == int(version)]
            if paths:
                found[name] = stream.outlet.url(paths[-1])
    if len(found) > 1:
        addresses = "; ".join(f"{name}: {address}" for name, address in found.items())
        raise SpecError(
            f"version {version} is exported by several streams; name one by its address: {addresses}", "version"
        )
    return next(iter(found.values()), None)
