"""The rules of the health family, in words."""

from __future__ import annotations

from kvtop.detect import health
from kvtop.detect.rule import Rule

RULES = (
    Rule(
        name="health.stopped",
        severity="critical",
        title="The engine core is stopped",
        explanation="The kernel shows the process in state T: a SIGSTOP, a debugger, or a profiler "
        "that left it so. The API server answers /health with 200 all the same and gauges freeze.",
        starts="process state T for {stopped_s}",
        clears="any other state for {clear_s}",
        next_step="Let it go on: kill -CONT PID. Then find out who stopped it.",
        disproof="The process state is R or S.",
        needs="process table",
        thresholds=("stopped_s",),
        for_s="stopped_s",
        engine=health.stopped,
    ),
    Rule(
        name="health.stalled",
        severity="critical",
        title="The engine has work and takes no step",
        explanation="Requests are in the scheduler and no scheduler step has begun for a while. "
        "Paused, sleeping, starting and compiling engines are told apart and do not count.",
        starts="no step for {stall_s} with work to do",
        clears="steps are taken for {clear_s}",
        next_step="Take a flame graph with idle frames (key f): it shows where the engine hangs. "
        "Restart it when it is in a collective or a driver call.",
        disproof="A step was taken after all: the step number grew.",
        needs="probe",
        thresholds=("stall_s",),
        yields_to=("health.stopped",),
        engine=health.stalled,
    ),
    Rule(
        name="health.compiling",
        severity="info",
        title="The engine compiles",
        explanation="No step is taken, and the stacks show a compiler or a graph capture at work.",
        starts="no step for {stall_s} and a compiler in the top frames",
        clears="steps are taken for {clear_s}",
        next_step="Wait. Warm the engine up with typical shapes before it gets traffic.",
        disproof="The same frames stay for many minutes.",
        needs="probe and stacks",
        thresholds=("stall_s",),
        engine=health.compiling,
    ),
    Rule(
        name="health.at-rest",
        severity="info",
        title="The engine is paused or asleep",
        explanation="It was told to pause or to sleep. It looks like a stall from outside and is "
        "none.",
        starts="the engine says so for {paused_s}",
        clears="it runs for {clear_s}",
        next_step="Resume it or wake it up when it should serve.",
        disproof="Nobody paused it and it does not resume.",
        needs="probe, or metrics",
        thresholds=("paused_s",),
        for_s="paused_s",
        engine=health.at_rest,
    ),
    Rule(
        name="health.orphan-engine",
        severity="critical",
        title="An engine whose API server is gone",
        explanation="When an API server dies hard, its engine core and workers can live on with "
        "nobody to serve, and keep the GPU's memory. A new server on the same GPU then finds no "
        "room.",
        starts="the API servers that it had are gone for {orphan_s}",
        clears="the engine is gone, or has an API server again",
        next_step="End the engine core and its workers.",
        disproof="The engine belongs to a program that uses vLLM without a server.",
        needs="process table",
        thresholds=("orphan_s",),
        for_s="orphan_s",
        engine=health.orphan,
    ),
    Rule(
        name="health.dead-engine",
        severity="info",
        title="An engine's process is gone",
        explanation="The engine core's process has ended. With its API server still there that is "
        "a crash nobody noticed (critical); together with its server it may just have been "
        "stopped.",
        starts="the process is gone for {dead_s}",
        clears="another engine takes its place",
        next_step="Look at the server's log for the engine's last words; start it again.",
        disproof="Somebody stopped it on purpose.",
        needs="process table",
        thresholds=("dead_s",),
        for_s="dead_s",
        engine=health.dead,
    ),
    Rule(
        name="health.stale-gauges",
        severity="warning",
        title="The gauges of /metrics are stale",
        explanation="A gauge claims running requests and no counter moves. After a mass abort some "
        "versions leave their gauges as they were; they then show use that is not there. Nothing "
        "about leaks follows from them.",
        starts="no counter has moved for {frozen_s} while requests are claimed to run",
        clears="counters move, or the gauge falls to 0, for {clear_s}",
        next_step="Trust the probe, not the gauges; one new request usually refreshes them.",
        disproof="Counters move between two pages.",
        needs="metrics; with the probe it is certain",
        thresholds=("frozen_s",),
        yields_to=("health.stopped", "health.stalled"),
        engine=health.stale_gauges,
    ),
    Rule(
        name="health.no-metrics",
        severity="info",
        title="/metrics tells nothing",
        explanation="The server's metrics cannot be read, or have no vLLM series: switched off "
        "(--disable-log-stats), an empty page, an error. Rates and hit rate are then unknown, not "
        "zero.",
        starts="it is so for {no_metrics_s}",
        clears="series are there for {clear_s}",
        next_step="Start the server without --disable-log-stats to have rates and hit rate.",
        disproof="curl on the server's /metrics shows vllm: series.",
        needs="metrics",
        thresholds=("no_metrics_s",),
        for_s="no_metrics_s",
        yields_to=("health.stopped",),
        engine=health.no_metrics,
    ),
    Rule(
        name="health.restarted",
        severity="info",
        title="The engine was restarted",
        explanation="Another process has taken the engine's place. Counters began again, and "
        "nothing is compared across the restart.",
        starts="the pid behind a server's engine changes",
        clears="after {restart_note_s}",
        next_step="If nobody restarted it, look for the reason in the server's log.",
        disproof="Two servers took turns on the same port.",
        needs="process table",
        thresholds=("restart_note_s",),
        clear_s="dead_s",
        engine=health.restarted,
    ),
)
