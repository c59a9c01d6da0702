"""Which of a job's own exports a version's number means, where no commit of that version is kept any more."""

from millrace.errors import SpecError
from service.exports.listing import opened
from service.spec import LoadedJob


def address_of(job: LoadedJob, version: str) -> str | None:
    """The address of the one complete export of a version, of the newest timeline that has it; None: there is none.

    Raises SpecError where several streams have one, Unavailable where a destination cannot be asked.
    """
    found: dict[str, str] = {}
    for name in job.spec.exports:
        with opened(job, name) as [stream]:
            paths = [each.path for each in stream.present() if each.complete and each.order[1] == int(version)]
            if paths:
                found[name] = stream.outlet.url(paths[-1])
    if len(found) > 1:
        told = "; ".join(f"{name}: {address}" for name, address in found.items())
        raise SpecError(f"version {version} is exported by several streams; name one by its address: {told}", "version")
    return next(iter(found.values()), None)
