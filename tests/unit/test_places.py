"""Which agent gets which worker: by rank, by order of joining, again after a death."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError, Unavailable
from headrace.rpc.joining import AgentFacts
from headrace.service.cluster.places import Places

NAMES = ("shard-0", "shard-1", "trainer-0", "trainer-1")


def agent(id, **more):
    return AgentFacts(**{"id": id, "machine": "head", **more})


@pytest.fixture
def places():
    places = Places("head", 10.0)
    places.open(NAMES, 3)
    return places


def test_places_go_by_order_of_joining_trainers_first(places):
    assert places.waits_for() == "waits for 4 of 4 workers: trainer-0, trainer-1, shard-0, shard-1"
    assert [places.ask(agent(id), 0) for id in "abcd"] == ["trainer-0", "trainer-1", "shard-0", "shard-1"]
    assert places.waits_for() is None
    assert places.ask(agent("b"), 1) == "trainer-1", "a repeat changes nothing"


def test_places_go_by_rank_where_there_is_one(places):
    assert places.ask(agent("a", rank=3, world=4), 0) == "shard-1"
    assert places.ask(agent("b", rank=1, world=2, role="trainer"), 0) == "trainer-1"
    assert places.ask(agent("c", role="shard"), 0) == "shard-0"
    assert places.waits_for() == "waits for 1 of 4 workers: trainer-0"


def test_rank_0_stays_at_the_head_unless_it_is_asked_for_by_its_rank(places):
    assert places.ask(agent("a", machine="node"), 0) == "trainer-1"
    assert places.ask(agent("b", machine="node", role="trainer"), 0) is None
    assert places.ask(agent("c", machine="node", rank=0, world=4), 0) == "trainer-0"


def test_rank_0_never_leaves_the_machine_that_alone_has_the_log():
    places = Places("head", 10.0, rank0_here=True)
    places.open(NAMES, 3)
    with pytest.raises(SpecError, match=r"RANK 0 is trainer-0, which keeps the job's log .* by --node-rank 0"):
        places.ask(agent("a", machine="node", rank=0, world=4), 0)
    assert places.ask(agent("b", machine="node", rank=1, world=4), 0) == "trainer-1"
    assert places.ask(agent("c", machine="head", rank=0, world=2, role="trainer"), 0) == "trainer-0"


@pytest.mark.parametrize(
    ("machines", "size", "divided"),
    [
        ("aabb", 2, ()),
        ("abab", 2, ("trainer-0", "trainer-1")),
        ("aabc", 2, ("trainer-2", "trainer-3")),
        ("aaab", 4, ("trainer-0", "trainer-1", "trainer-2", "trainer-3")),
        ("abcd", 1, ()),
    ],
)
def test_a_group_of_trainers_on_several_machines_is_found(machines, size, divided):
    places = Places("a", 10.0)
    places.open(("shard-0", *(f"trainer-{rank}" for rank in range(4))), 1)
    places.ask(agent("s", machine="z", role="shard"), 0)
    for number, machine in enumerate(machines):
        assert places.divided_group(size) in ((), divided), "a missing agent divides nothing"
        places.ask(agent(str(number), machine=machine), 0)
    assert places.divided_group(size) == divided


@pytest.mark.parametrize(
    ("machines", "together"),
    [("ababab", "aaabbb"), ("aabbcc", "aabbcc"), ("abcabc", "aabbcc"), ("abbbaa", "aaabbb"), ("aaaaaa", "aaaaaa")],
)
def test_trainers_of_a_machine_become_neighbours(machines, together):
    places = Places("a", 10.0)
    places.open(("shard-0", *(f"trainer-{rank}" for rank in range(6))), 1)
    places.ask(agent("s", machine="b", role="shard"), 0)
    for number, machine in enumerate(machines):
        places.ask(agent(str(number), machine=machine), 0)
    for _ in range(2):
        places.bring_together()
        assert "".join(places.agents[f"trainer-{rank}"].machine for rank in range(6)) == together
    assert places.agents["shard-0"].id == "s" and places.agents["trainer-0"].id == "0"
    assert sorted(held.id for held in places.agents.values()) == [*"012345", "s"]
    assert [places.ask(held, 1) for held in places.agents.values()] == [*places.agents]


def test_trainers_that_asked_by_rank_or_were_there_before_stay_where_they_are():
    places = Places("a", 10.0)
    places.open([f"trainer-{rank}" for rank in range(6)], 2)
    for number, machine in enumerate("abcabc"):
        places.ask(agent(str(number), machine=machine, last=f"trainer-{number}" if machine == "b" else None), 0)
    places.bring_together()
    assert "".join(places.agents[f"trainer-{rank}"].machine for rank in range(6)) == "abacbc"
    places.open([f"trainer-{rank}" for rank in range(4)], 3)
    for number, machine in enumerate("abab"):
        places.ask(agent(str(number), machine=machine, rank=number, world=4), 0)
    places.bring_together()
    assert [places.agents[f"trainer-{rank}"].id for rank in range(4)] == [*"0123"]


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"rank": 0, "world": 4}, Unavailable, "RANK 0 of generation 3 is trainer-0, which an agent of this machine"),
        ({"rank": 0, "world": 2}, SpecError, r"WORLD_SIZE 2, and the job has 4 workers \(2 trainers, 2 shards\)"),
        ({"rank": 2, "world": 2, "role": "shard"}, SpecError, "RANK 2 of WORLD_SIZE 2, and the job has 2 shards"),
    ],
)
def test_a_rank_that_is_taken_or_does_not_fit_is_refused(places, asked, error, words):
    places.ask(agent("a"), 0)
    with pytest.raises(error, match=words):
        places.ask(agent("b", **asked), 0)
    assert places.known == {"a"}, "who is refused is not told the end of the job"


def test_one_agent_too_many_is_refused_and_one_that_waits_is_not(places):
    for id in "abcd":
        places.ask(agent(id), 0)
    with pytest.raises(Unavailable, match=r"all of its workers \(2 trainers, 2 shards\); this worker is one too many"):
        places.ask(agent("e"), 0)
    places.close("trainer-0")
    assert places.ask(agent("e"), 0) is None, "the generation ends: it may get a place in the next one"
    places.open(NAMES, 4)
    assert places.ask(agent("e"), 0) == "trainer-0"


def test_a_worker_of_before_that_ends_late_closes_nothing(places):
    places.open(["trainer-7"], 4)
    places.close("trainer-0")
    assert places.ask(agent("a"), 0) == "trainer-7"


def test_a_role_that_the_job_does_not_have_is_refused():
    places = Places("head", 10.0)
    places.open(["trainer-0"], 1)
    with pytest.raises(SpecError, match="generation 1 has no shards; its workers are 1 trainer"):
        places.ask(agent("a", role="shard"), 0)


def test_the_last_readers_are_waited_for_as_long_as_a_machine_that_is_silent():
    places = Places("head", 10.0)
    places.open(["shard-0", "reader-0", "reader-1", "reader-2", "trainer-0"], 3)
    for id, role in (("t", "trainer"), ("r", "reader")):
        assert places.ask(agent(id, role=role), 0)
    assert places.starts_without(0) == places.starts_without(50) == (), "a shard is missing"
    assert places.ask(agent("s", role="shard"), 50) == "shard-0"
    text = "waits for 2 of 5 workers: reader-1, reader-2; starts without them after 10 s (cluster.node_timeout)"
    assert (places.starts_without(51), places.waits_for()) == ((), text)
    assert places.starts_without(60.9) == () and places.starts_without(61) == ("reader-1", "reader-2")
    places.leave("r")
    assert places.starts_without(62) == (), "one reader must be there"
    assert places.ask(agent("r", role="reader"), 63) == "reader-0" and places.starts_without(64) == ()
    assert places.starts_without(74) == ("reader-1", "reader-2")


def test_the_place_of_a_reader_that_ended_is_for_the_agent_that_asks_next():
    places = Places("head", 10.0)
    places.open(["trainer-0", "reader-0", "reader-1"], 3)
    assert [places.ask(agent(id), 0) for id in "tqr"] == ["trainer-0", "reader-0", "reader-1"]
    places.free("reader-1", "r")
    assert "reader-1" not in places.agents
    assert places.ask(agent("new"), 1) == "reader-1"
    places.free("reader-1", "r")
    assert "reader-1" in places.agents, "its end is told late, and another agent has the place"
    with pytest.raises(Unavailable, match="one too many"):
        places.ask(agent("r", last="reader-1"), 2)


def test_agents_of_readers_wait_while_a_job_predicts():
    places, names = Places("head", 10.0), ["shard-0", "predictor-0", "predictor-1"]
    places.open(names, 4, ["reader-0"])
    assert places.ask(agent("r", role="reader"), 0) == "reader-0", "it is not refused"
    with pytest.raises(Unavailable):
        places.ask(agent("q", role="reader"), 0)
    assert [places.ask(agent(id), 0) for id in "abc"] == ["predictor-0", "predictor-1", "shard-0"]
    assert places.waits_for() is None
    places.open(names, 5, ["reader-0"])
    assert places.waits_for() == "waits for 3 of 3 workers: predictor-0, predictor-1, shard-0"
    of_job = [places.ask(agent(f"j{rank}", rank=rank, world=4), 0) for rank in range(4)]
    assert of_job == ["predictor-0", "predictor-1", "shard-0", "reader-0"]
    places.open(names, 6, ["reader-0"])
    assert places.ask(agent("o", rank=2, world=3), 0) == "shard-0", "started for the prediction alone"


def test_after_a_death_an_agent_gets_its_worker_again_where_that_is_free(places):
    places.open(NAMES, 4)
    assert places.ask(agent("b", last="shard-1"), 0) == "shard-1"
    assert places.ask(agent("c", last="shard-1"), 0) == "trainer-0"


def test_a_silent_agent_loses_its_place(places):
    places.ask(agent("a"), 0)
    places.ask(agent("b"), 0)
    places.heard("b", 8)
    assert places.silent(10) == {}
    assert places.silent(10.5) == {"a": "trainer-0"}
    assert (places.known, places.waits_for()) == ({"b"}, "waits for 3 of 4 workers: trainer-0, shard-0, shard-1")


def test_trainers_share_their_machine_by_rank(places):
    for id, machine in zip("abcd", ("head", "node", "node", "head"), strict=True):
        places.ask(agent(id, machine=machine), 0)
    assert [places.local_rank(name) for name in ("trainer-0", "trainer-1")] == [(0, 1), (0, 1)]
    places.open(NAMES, 4)
    for id in "abcd":
        places.ask(agent(id, local_rank=5 if id == "a" else None), 0)
    assert [places.local_rank(name) for name in ("trainer-0", "trainer-1", "shard-1")] == [(5, 2), (1, 2), (1, 2)]


@given(st.lists(st.tuples(st.sampled_from(["ask", "leave", "open", "silent"]), st.sampled_from("abcdef"))))
def test_no_worker_has_two_agents_and_no_agent_two_workers(events):
    places, now_s = Places("head", 3.0), 0.0
    places.open(NAMES, 1)
    for what, id in events:
        now_s += 1
        match what:
            case "ask":
                try:
                    name = places.ask(agent(id), now_s)
                except Unavailable:
                    assert len(places.agents) == len(NAMES)
                else:
                    assert places.agents[name].id == id
            case "leave":
                places.leave(id)
            case "open":
                places.open(NAMES, 2)
            case "silent":
                places.silent(now_s)
        holders = [holder.id for holder in places.agents.values()]
        assert len(set(holders)) == len(holders) and set(holders) <= places.known
