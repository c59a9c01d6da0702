"""`headrace.connect` against a real service: every action is a method, with its arguments, its role and its errors."""

import asyncio

import pytest

from headrace import AsyncService, HeadraceError, Service, connect, connect_async
from headrace.errors import Refused, SpecError
from headrace.service.auth.roles import Role
from tests.integration.served_host import SPEC, served_host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def host(folder):
    with served_host(folder) as made:
        yield made


@pytest.fixture
def service(host):
    with connect(host.url, host.texts[Role.ADMIN]) as made:
        yield made
        for job in made.list_jobs():
            made.delete_job(job["name"])


def test_a_job_is_created_shown_listed_changed_and_deleted(service):
    made = service.create_job(spec=SPEC, start=False)
    assert made["name"] == "news" and service.get_job("news")["phase"] == "stopped"
    assert [each["name"] for each in service.list_jobs()] == ["news"]
    assert service.get_spec("news")["spec"]["model"] == {"name": "lr"}
    assert service.list_commits("news") == [] and service.list_operations(job="news") == []
    service.delete_job("news", keep_store=False)
    assert service.list_jobs() == []


def test_a_list_of_several_pages_comes_whole(service, monkeypatch):
    monkeypatch.setattr("headrace.service.python.service_connection.PAGE", 2)
    names = [f"news-{number}" for number in range(5)]
    for name in names:
        service.create_job(spec=SPEC, name=name, start=False)
    assert [each["name"] for each in service.list_jobs()] == names


def test_an_operation_is_awaited_and_raises_what_it_failed_with(service, folder):
    service.create_job(spec=SPEC, start=False)
    (folder / "data" / "events.txt").write_text("1 5 1 0\n")
    asked = {"input": {"paths": [f"{folder}/data/events.txt"]}, "output": f"{folder}/data/predicted"}
    begun = service.predict_by_job("news", **asked, wait=False)
    assert begun["kind"] == "predict" and begun["state"] in ("waiting", "running", "failed")
    with pytest.raises(HeadraceError, match="holds no run"):
        service.predict_by_job("news", **asked, timeout_s=60)
    assert len(service.list_predictions("news")) == 2


def test_what_the_service_refuses_is_this_projects_error(service, host):
    with pytest.raises(SpecError, match="pipe"):
        service.create_job(spec={**SPEC, "pipe": {"command": ["rm", "-rf", "x"]}})
    with pytest.raises(HeadraceError, match="nobody"):
        service.get_job("nobody")
    with connect(host.url, host.texts[Role.VIEWER]) as viewer, pytest.raises(Refused, match="admin"):
        viewer.create_job(spec=SPEC)
    with connect(host.url) as stranger, pytest.raises(Refused, match="token"):
        stranger.list_jobs()


def test_a_wrong_name_names_its_neighbour(service):
    with pytest.raises(AttributeError, match="list_jobs"):
        service.list_job()
    with pytest.raises(TypeError, match=r"make_export\(\) .*'strem'.*stream"):
        service.make_export("news", strem="serving")
    with pytest.raises(TypeError, match=r"make_export\(\) needs stream"):
        service.make_export("news")
    with pytest.raises(TypeError, match=r"get_job\(\) takes 1 positional"):
        service.get_job("news", "more")


def test_a_name_leads_to_no_other_path(service):
    with pytest.raises(SpecError, match="not a name"):
        service.get_job("..")
    with pytest.raises(HeadraceError, match="Not Found"):
        service.get_job("a/../b")  # one part of a path, which has no such job


def test_many_actions_go_on_at_once_in_an_event_loop(host):
    async def work():
        async with connect_async(host.url, host.texts[Role.ADMIN]) as service:
            assert isinstance(service, AsyncService)
            made = await service.create_job(spec=SPEC, start=False)
            several = await asyncio.gather(*(service.get_job(made["name"]) for _ in range(8)))
            with pytest.raises(HeadraceError, match="nobody"):
                await service.get_job("nobody")
            await service.delete_job(made["name"])
            return several

    assert [each["phase"] for each in asyncio.run(work())] == ["stopped"] * 8


def test_a_job_file_is_submitted_as_the_command_does(service, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "news"\nsources.main = { kind = "simulated", events = 1000 }\npipe.command = ["cat"]\n'
        'slots = [{ name = "user" }, { name = "label", kind = "meta" }]\ntasks = [{ name = "ctr", label = "label" }]\n'
        'model.name = "lr"\nstore.path = "store"\n'
    )
    assert isinstance(service, Service)
    assert service.submit(path, ["seed=7"], start=False)["name"] == "news"
    assert service.get_spec("news")["spec"]["seed"] == 7
