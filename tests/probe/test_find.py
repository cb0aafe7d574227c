"""Looking for the engine runs no code of the objects that are looked at."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from types import SimpleNamespace

import pytest
from probe_fakes import Engine

from kvtop.probe import control, find

COUNT = []


def run_foreign(*args, **kwargs):
    COUNT.append(args)
    raise RuntimeError("code of an object was run")


def touchy_objects():
    """Objects with every way in which reading them could run code.

    Made in here: pytest itself reads what a module or a parameter has.
    """

    class Meta(type):
        """A class that is as touchy as its instances."""

        __instancecheck__ = __subclasscheck__ = __getattr__ = __eq__ = __bool__ = run_foreign
        __hash__ = type.__hash__
        __mro__ = property(run_foreign)

    class Touchy(metaclass=Meta):
        __getattr__ = __getattribute__ = __eq__ = __bool__ = __len__ = __iter__ = run_foreign
        __instancecheck__ = __subclasscheck__ = __contains__ = __getitem__ = run_foreign
        __hash__ = object.__hash__
        __class__ = property(run_foreign)
        scheduler = engine_core = output_processor = request_states = property(run_foreign)
        model_runner = rank = worker = _loop = llm_engine = engine = property(run_foreign)

    class OwnDict(metaclass=Meta):
        __getattribute__ = run_foreign
        __dict__ = property(run_foreign)

    class Slots:
        __slots__ = ("scheduler",)

    class LazyModule(types.ModuleType):
        __getattr__ = run_foreign

    class OddDict(dict):
        __contains__ = __getitem__ = get = __bool__ = run_foreign

    return {
        "instance": Touchy(),
        "class": Touchy,
        "own __dict__": OwnDict(),
        "slots": Slots(),
        "lazy module": LazyModule("lazy"),
        "empty dict": OddDict(),
        "full dict": OddDict(scheduler=1),
        "object": object(),
        "none": None,
        "number": 3,
        "text": "text",
        "list": [],
    }


class Namespace(dict):
    """What a metaclass may give a class body to write its names into."""

    def __contains__(self, name):
        return run_foreign(name)


def all_ways(obj):
    return [
        obj,
        *(SimpleNamespace(**{name: obj}) for name in find.NAMES),
        SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=obj, requests={})),
        SimpleNamespace(
            scheduler=SimpleNamespace(kv_cache_manager=SimpleNamespace(), requests=obj)
        ),
        SimpleNamespace(
            scheduler=SimpleNamespace(
                kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(blocks=obj)),
                requests={},
            )
        ),
        SimpleNamespace(engine_core=obj, output_processor=obj),
        SimpleNamespace(worker=obj, model_runner=obj, rank=obj, _loop=obj),
        SimpleNamespace(worker=SimpleNamespace(worker=obj)),
        SimpleNamespace(output_processor=SimpleNamespace(request_states=obj), engine_core=obj),
    ]


@pytest.mark.parametrize("kind", list(touchy_objects()))
def test_no_code_of_an_object_is_run(kind):
    obj = touchy_objects()[kind]
    COUNT.clear()
    for self in all_ways(obj):
        assert find.engine_in(self) is None
        find._output_processor(self)
    found = []

    def look():
        found.append((find.find_engine(), find.find_front_end()))
        find.find_worker()

    for self in all_ways(obj):  # `self` here is what the frame leads to.
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert self is not found
    assert [engine for engine, _ in found] == [None] * len(all_ways(obj))
    assert COUNT == []


def test_a_class_body_with_names_of_its_own_is_passed_over():
    COUNT.clear()
    seen = []

    class Prepared(type):
        @classmethod
        def __prepare__(cls, name, bases):
            return Namespace()

    def look():
        thread = threading.Thread(target=lambda: seen.append(find.find_engine()))
        thread.start()
        thread.join()

    class Body(metaclass=Prepared):
        look()

    assert seen == [None]
    assert COUNT == []


def test_the_search_through_all_objects_runs_no_code_either(monkeypatch):
    class EngineCore:
        def __init__(self):
            self.scheduler = Engine().scheduler

    module = types.ModuleType("vllm.v1.engine.core")
    module.EngineCore = EngineCore
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    COUNT.clear()
    touchy = touchy_objects()
    core = EngineCore()
    assert find.find_engine_by_gc() is core
    assert COUNT == []
    assert touchy


def core_in_process():
    core = SimpleNamespace(scheduler=Engine().scheduler)
    return SimpleNamespace(
        output_processor=SimpleNamespace(request_states={}),
        engine_core=SimpleNamespace(engine_core=core),
    ), core


def test_an_engine_in_the_process_wins_over_its_front_end():
    """`LLM(...)` with VLLM_ENABLE_V1_MULTIPROCESSING=0."""
    engine, core = core_in_process()
    assert find.engine_in(engine) is core
    assert find.engine_in(SimpleNamespace(llm_engine=engine)) is core
    assert find._output_processor(engine) is None
    assert find._output_processor(SimpleNamespace(llm_engine=engine)) is None


def test_a_front_end_of_an_engine_elsewhere_is_one():
    """`LLM(...)` as it is by default."""
    processor = SimpleNamespace(request_states={})
    engine = SimpleNamespace(output_processor=processor, engine_core=SimpleNamespace())
    assert find._output_processor(engine) is processor
    assert find._output_processor(SimpleNamespace(llm_engine=engine)) is processor


def test_an_output_processor_still_being_built_decides_nothing(probe_dir):
    """In-process, it exists seconds before the engine core does."""
    engine, core = core_in_process()
    client, engine.engine_core = engine.engine_core, None
    stop, built = threading.Event(), threading.Event()

    class OutputProcessor:
        def __init__(self):
            self.request_states = {}
            built.wait(30)

    def make():
        self = engine
        OutputProcessor()
        self.engine_core = client
        stop.wait(30)

    thread = threading.Thread(target=make)
    control.start(directory=probe_dir)
    thread.start()
    try:
        probe = control.current()
        assert not probe.ready.wait(3 * control.STARTING_PERIOD_S)
        built.set()
        assert probe.ready.wait(20)
        assert probe.role.name == "engine"
        assert probe.role.facts.engine is core
    finally:
        built.set()
        stop.set()
        thread.join()


def test_a_loop_is_known_by_its_class():
    loop = asyncio.new_event_loop()
    try:
        self = SimpleNamespace(_loop=loop)
        assert find.find_front_end() is None
        assert find.own(self)["_loop"] is loop
    finally:
        loop.close()
