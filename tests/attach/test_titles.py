from __future__ import annotations

import pytest

from kvtop.attach.titles import Role, classify, server_args


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--port", "1"], Role.API),
        (["/opt/venv/bin/python3.12", "/opt/venv/bin/vllm", "serve", "m"], Role.API),
        (["/opt/venv/bin/vllm", "serve", "m"], Role.API),
        (["python", "-u", "-X", "dev", "-m", "vllm.entrypoints.openai.api_server"], Role.API),
        (["python", "-W", "ignore", "-um", "vllm.entrypoints.cli.main", "serve"], Role.API),
        (["python", "-mvllm.entrypoints.openai.api_server"], Role.API),
        (["VLLM::EngineCore"], Role.ENGINE),
        (["VLLM::EngineCore_DP1"], Role.ENGINE),
        (["VLLM::EngineCore_0"], Role.ENGINE),
        (["mine::EngineCore"], Role.ENGINE),
        (["VLLM::Worker"], Role.WORKER),
        (["VLLM::Worker_DP0_PP1_TP3_EP3"], Role.WORKER),
        (["VLLM::APIServer_1"], Role.API),
        (["VLLM::DPCoordinator"], Role.COORDINATOR),
        (["python", "-c", "from multiprocessing.spawn import spawn_main"], Role.SPAWNED),
        (["python", "-c", "from multiprocessing.resource_tracker import main"], Role.HELPER),
        (["python", "/x/kvtop", "demo", "--serve"], Role.DEMO),
        (["python", "-m", "kvtop", "demo", "--serve"], Role.DEMO),
        (["python", "script.py"], Role.PYTHON),
        (["python"], Role.PYTHON),
        (["python", "/opt/venv/bin/vllm", "bench", "serve"], Role.PYTHON),
        (["python", "-m", "kvtop", "demo"], Role.PYTHON),
    ],
)
def test_what_a_command_line_is(argv: list[str], role: Role) -> None:
    title = classify(tuple(argv))
    assert title is not None
    assert title.role is role


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["sh", "-c", "vllm serve model"],
        ["timeout", "60", "vllm", "serve", "m"],
        ["grep", "VLLM::EngineCore"],
        ["ray::Worker"],
        ["VLLM::EngineCoreX"],
        ["std::vector"],
        ["vim", "vllm.entrypoints.openai.api_server"],
    ],
)
def test_what_it_is_not(argv: list[str]) -> None:
    assert classify(tuple(argv)) is None


@pytest.mark.parametrize(
    ("title", "rank", "own"),
    [
        ("VLLM::EngineCore", None, False),
        ("VLLM::EngineCore_DP3", 3, False),
        ("VLLM::EngineCore_2", 2, False),
        ("VLLM::APIServer_1", 1, False),
        ("VLLM::APIServer_DP1", 1, True),
    ],
)
def test_ranks(title: str, rank: int | None, own: bool) -> None:
    found = classify((title,))
    assert found is not None
    assert (found.rank, found.own_front) == (rank, own)


def test_arguments_of_a_server() -> None:
    line = (
        "python /v/bin/vllm serve org/model --served-model-name a b --port=81 --host 0.0.0.0 "
        "--root_path /x/y/ --ssl-keyfile k --port 82"
    )
    args = server_args(tuple(line.split()))
    assert (args.model, args.port, args.host) == ("a", 82, "0.0.0.0")
    assert (args.root_path, args.tls, args.headless) == ("/x/y", True, False)


def test_arguments_that_make_no_sense_are_unknown() -> None:
    args = server_args(("python", "-m", "vllm.entrypoints.openai.api_server", "--port", "99999"))
    assert (args.port, args.model, args.root_path) == (None, None, "")
    assert server_args(("vllm", "serve", "--port")).port is None
    assert server_args(("vllm", "serve", "m", "--uds", "/run/v.sock", "--headless")).headless
