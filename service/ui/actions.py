"""The buttons of a job's page: what its reader may have done, of which what makes sense now can be pressed."""

from urllib.parse import quote

import httpx
from nicegui import ui

from service.ui.acts import REWIND, Act, Job, Known, offered
from service.ui.asking import Refused, Visitor, listed
from service.ui.dialogs import Confirmation


class Actions:
    """See module docstring. A reader who may nothing is told so."""

    def __init__(self, visitor: Visitor, name: str) -> None:
        self._visitor, self._path = visitor, f"/jobs/{quote(name, safe='')}"
        self._job: Job | None = None
        self._buttons: list[tuple[Act, ui.button]] = []
        with ui.element("div").classes("actions"):
            acts = offered(visitor.may)
            for act in acts:
                button = ui.button(act.label, on_click=lambda act=act: self._open(act))
                button.props("outline dense no-caps color=grey-8").mark(act.operation)
                button.disable()
                self._buttons.append((act, button))
            if not acts:
                ui.label("read only").classes("hint")

    def show(self, job: Job) -> None:
        """Offer what makes sense of the job as it is."""
        self._job = job
        for act, button in self._buttons:
            button.set_enabled(act.sense(job))

    async def _open(self, act: Act) -> None:
        if self._job is None:
            return
        try:
            spec = (await self._visitor.get(f"{self._path}/spec"))["spec"] if act.fields else {}
            commits = await listed(self._visitor, f"{self._path}/commits") if act is REWIND else []
        except (Refused, httpx.HTTPError) as error:
            ui.notify(str(error), type="negative")
            return
        known = Known(self._job, spec, [each["name"] for each in reversed(commits)])
        Confirmation(self._visitor, act, known, self._again).open()

    async def _again(self) -> Job:
        job: Job = await self._visitor.get(self._path)
        self.show(job)
        return job
