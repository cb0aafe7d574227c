"""Which process belongs to which engine, and which engine to which server. Pure.

Process trees seen with vLLM 0.32 (names are process titles):

    vllm serve ...                     one API server: it is the parent of all
      VLLM::EngineCore                 or _DP0, _DP1 with data parallelism
        VLLM::Worker                   or _TP0, _TP1; absent when the engine runs the model
      VLLM::DPCoordinator
      VLLM::APIServer_0, _1            only with several API servers
    python script.py                   LLM(...): the parent has no HTTP side
      VLLM::EngineCore
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtop.attach.servers import FoundEngine, FoundProcess, FoundServer
from kvtop.attach.titles import Role, ServerArgs, Title
from kvtop.attach.where import Address


@dataclass(frozen=True, slots=True)
class Node:
    """One process that may be part of a server."""

    process: FoundProcess
    """Who it is; `probe_socket` is left to `sockets` here."""
    ppid: int
    """Parent."""
    pgrp: int
    """Process group; a child keeps its parent's, also when it is adopted by another."""
    title: Title
    """What it says it is."""
    argv: tuple[str, ...] = ()
    """Arguments."""
    args: ServerArgs = field(default_factory=ServerArgs)
    """What they say, where it is an API server."""
    sockets: Mapping[str, Path] = field(default_factory=dict)
    """Probe sockets by role."""

    @property
    def is_engine(self) -> bool:
        """An engine core by title or by its probe."""
        return self.title.role is Role.ENGINE or "engine" in self.sockets

    @property
    def is_worker(self) -> bool:
        """A worker by title or by its probe."""
        return not self.is_engine and (self.title.role is Role.WORKER or "worker" in self.sockets)

    def found(self, *roles: str) -> FoundProcess:
        """As part of the outcome, with the probe socket of the first role that has one."""
        one = self.process
        socket = next((self.sockets[role] for role in roles if role in self.sockets), None)
        return FoundProcess(
            one.pid,
            one.ns_pid,
            one.uid,
            one.start_ticks,
            one.start_time_s,
            one.container,
            socket,
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A server whose address is not known yet."""

    root: Node
    """Launcher, owner of an in-process engine, or the engine itself."""
    fronts: Sequence[Node]
    """API server processes."""
    engines: Sequence[Node]
    """Engine cores."""
    untitled: Sequence[Node]
    """Children that may be engines of a vLLM that sets no titles (before 0.10)."""
    workers: Mapping[int, Sequence[Node]]
    """Workers by pid of the engine."""
    args: ServerArgs
    """Command line of the launcher."""
    orphan: bool = False
    """The engine's parent is gone."""
    offline: bool = False
    """In-process `LLM(...)`."""

    def server(self, address: Address, taken: set[str], python: str | None) -> FoundServer:
        """The finished server.

        Children without a title are engines only once the server listens: before that
        they are processes that have not yet set their title.

        Args:
            address: Where it answers.
            taken: Keys in use by other servers.
            python: Python executable of its environment.
        """
        engines = self.engines or (self.untitled if address.listening else ())
        key = address.key
        if key is None or key in taken:
            key = f"pid {self.root.process.pid}"
        api_pids = tuple(front.process.pid for front in self.fronts)
        found = tuple(
            FoundEngine(
                process=node.found("engine"),
                rank=_rank(node, len(engines)),
                workers=tuple(w.found("worker") for w in self.workers.get(node.process.pid, ())),
                api_pids=api_pids,
            )
            for node in engines
        )
        return FoundServer(
            key=key,
            url=address.url,
            apis=tuple(front.found("api", "engine") for front in self.fronts),
            engines=tuple(sorted(found, key=lambda e: (e.rank is None, e.rank or 0, e.pid))),
            launcher_pid=None if self.orphan else self.root.process.pid,
            uds=address.uds,
            listening=address.listening,
            model=self.args.model,
            python=python,
            container=self.root.process.container,
            orphan=self.orphan,
            offline=self.offline,
            demo=self.root.title.role is Role.DEMO,
        )


@dataclass(frozen=True, slots=True)
class Grouping:
    """All servers of one look."""

    drafts: tuple[Draft, ...]
    """Servers, oldest pid first."""
    stray_pids: tuple[int, ...]
    """Workers without an engine."""


def _rank(node: Node, engines: int) -> int | None:
    if node.title.rank is not None and node.title.role is Role.ENGINE:
        return node.title.rank
    return 0 if engines == 1 else None


class _Tree:
    """Parent and child among the nodes."""

    def __init__(self, nodes: Mapping[int, Node], parents: Mapping[int, int]) -> None:
        self.nodes = nodes
        self.parents = parents

    def ancestors(self, pid: int) -> list[Node]:
        """Nodes above, nearest first. A loop, which a racing read can show, ends it."""
        found: list[Node] = []
        seen = {pid}
        at = self.parents.get(pid, 0)
        while at > 0 and at not in seen:
            seen.add(at)
            if at in self.nodes:
                found.append(self.nodes[at])
            at = self.parents.get(at, 0)
        return found

    def parent(self, pid: int) -> Node | None:
        return self.nodes.get(self.parents.get(pid, 0))

    def children(self, pid: int) -> list[Node]:
        return [node for node in self.nodes.values() if node.ppid == pid]


def group(nodes: Mapping[int, Node], parents: Mapping[int, int]) -> Grouping:
    """Groups processes into servers.

    Args:
        nodes: Candidates by pid.
        parents: Parent of every process on the machine, so that a shell between two
            candidates does not part them.
    """
    tree = _Tree(nodes, parents)
    fronts = _fronts(tree)
    engines = _engines(tree, fronts.roots)
    workers, strays = _workers(tree, engines)
    supervisors = {
        above.process.pid
        for root in fronts.roots.values()
        if root.title.own_front
        for above in tree.ancestors(root.process.pid)
    }
    drafts: list[Draft] = []
    for pid, root in fronts.roots.items():
        served = engines.by_root.get(pid, [])
        if not served and pid in supervisors:
            continue
        untitled = [*fronts.forked.get(pid, [])]
        untitled += [node for node in tree.children(pid) if node.title.role is Role.SPAWNED]
        for node in untitled:
            below = [n for n in tree.children(node.process.pid) if n.title.role is Role.SPAWNED]
            workers.setdefault(node.process.pid, below)
        args = _args(tree, root)
        own = [] if args.headless else [root]
        drafts.append(Draft(root, fronts.extra.get(pid) or own, served, untitled, workers, args))
    for pid, owner in engines.owners.items():
        front = [owner] if "api" in owner.sockets else []
        found = engines.by_root[pid]
        drafts.append(Draft(owner, front, found, [], workers, ServerArgs(), offline=True))
    none = ServerArgs()
    drafts += [Draft(n, [], [n], [], workers, none, offline=True) for n in engines.alone]
    drafts += [Draft(n, [], [n], [], workers, none, orphan=True) for n in engines.orphans]
    drafts.sort(key=lambda draft: draft.root.process.pid)
    return Grouping(tuple(drafts), tuple(strays))


@dataclass(slots=True)
class _Fronts:
    """The HTTP side."""

    roots: dict[int, Node] = field(default_factory=dict)
    """Launchers, and everything else that is a server of its own."""
    extra: dict[int, list[Node]] = field(default_factory=dict)
    """Further API servers by pid of their launcher."""
    forked: dict[int, list[Node]] = field(default_factory=dict)
    """Children with their launcher's arguments: forks that have not named themselves."""


def _fronts(tree: _Tree) -> _Fronts:
    found = _Fronts()
    for pid, node in sorted(tree.nodes.items()):
        if node.title.role is Role.DEMO:
            found.roots[pid] = node
        if node.title.role is not Role.API:
            continue
        above = next((n for n in tree.ancestors(pid) if n.title.role is Role.API), None)
        if above is None or node.title.own_front:
            found.roots[pid] = node
        elif node.title.titled:
            found.extra.setdefault(above.process.pid, []).append(node)
        elif node.argv == above.argv:
            found.forked.setdefault(above.process.pid, []).append(node)
        else:
            found.roots[pid] = node
    return found


@dataclass(slots=True)
class _Engines:
    """Engine cores by what is above them."""

    by_root: dict[int, list[Node]] = field(default_factory=dict)
    """Under a launcher or an owner, by its pid."""
    owners: dict[int, Node] = field(default_factory=dict)
    """Python processes with an engine and no HTTP side."""
    alone: list[Node] = field(default_factory=list)
    """Processes that have told through their probe that they hold an engine."""
    orphans: list[Node] = field(default_factory=list)
    """Engine cores whose parent is gone."""


def _engines(tree: _Tree, roots: Mapping[int, Node]) -> _Engines:
    found = _Engines()
    for pid, node in sorted(tree.nodes.items()):
        if not node.is_engine and node.title.role is not Role.DEMO:
            continue
        above = next((n for n in [node, *tree.ancestors(pid)] if n.process.pid in roots), None)
        parent = tree.parent(pid)
        if above is not None:
            found.by_root.setdefault(above.process.pid, []).append(node)
        elif node.title.role is not Role.ENGINE:
            found.alone.append(node)
        elif parent is not None and parent.title.role is Role.PYTHON and parent.pgrp == node.pgrp:
            found.owners[parent.process.pid] = parent
            found.by_root.setdefault(parent.process.pid, []).append(node)
        else:
            # A parent of another process group has only adopted it.
            found.orphans.append(node)
    return found


def _workers(tree: _Tree, engines: _Engines) -> tuple[dict[int, list[Node]], list[int]]:
    """Workers by pid of their engine, and those that have none."""
    found: dict[int, list[Node]] = {}
    strays: list[int] = []
    for pid, node in sorted(tree.nodes.items()):
        if not node.is_worker:
            continue
        above = next((n for n in tree.ancestors(pid) if n.is_engine), None)
        parent = tree.parent(pid)
        own = parent is not None and parent.title.role is Role.PYTHON and parent.pgrp == node.pgrp
        if above is None and parent is not None and own:
            # LLM(...) with the engine in the process of the script.
            above = engines.owners.setdefault(parent.process.pid, parent)
            engines.by_root.setdefault(parent.process.pid, [parent])
        if above is None:
            strays.append(pid)
        else:
            found.setdefault(above.process.pid, []).append(node)
    return found, strays


def _args(tree: _Tree, root: Node) -> ServerArgs:
    """Arguments of a launcher; a title has taken their place below a supervisor, which has them."""
    if not root.title.titled:
        return root.args
    above = next(iter(tree.ancestors(root.process.pid)), None)
    return ServerArgs(model=above.args.model if above else None)
