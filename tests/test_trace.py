"""Traces: what is read from plain events, and a real trace on this machine's device."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxserve
from jaxserve import bandwidth, trace
from jaxserve.errors import JaxserveError
from jaxserve.trace import Call, Event, Kinds, kind_of, kinds_from_hlo, summarise
from tests.engines import scripted

GPU, HOST, STREAM = "/device:GPU:0", "/host:CPU", "Stream #13(Compute,MemcpyD2D)"
STEP_NS = 1_000_000  # one step a millisecond


def mark(name, start, duration=100_000, **stats):
    return Event(name, start, duration, stats, "python", HOST)


def program(name, start, duration=80_000):
    return Event(f"jit_{name}:XLA GPU module", start, duration, {}, "python", HOST)


def host(name, start, **stats):
    return Event(name, start, 5_000, stats, "python", HOST)


def kernel(name, start, duration, correlation, **stats):
    return Event(name, start, duration, {"correlation_id": correlation, **stats}, STREAM, GPU)


def decode_step(number, at, *, kernels=3, updates=0):
    """One step as a healthy engine leaves it: one graph, then one loose launch and one copy for the peek."""
    correlation = 1000 + number
    events = [
        mark("decode", at, step_num=number, tokens=1),
        program("decode", at + 10_000),
        host("command_buffer::execute", at + 20_000, num_executions=number),
        host("cuGraphLaunch", at + 21_000, correlation_id=correlation),
        program("peek", at + 95_000, 20_000),
        host("cuLaunchKernelEx", at + 100_000, correlation_id=correlation + 500),
        host("cuMemcpyDtoHAsync", at + 120_000, correlation_id=correlation + 600),
    ]
    events += [host("command_buffer::update", at + 15_000) for _ in range(updates)]
    for index in range(kernels):  # 150 µs of work, then 50 µs of nothing; they run long after the launch
        start = at + 400_000 + 200_000 * index
        events.append(kernel(f"fusion_{index}", start, 150_000, correlation, cuda_graph_id=7))
    return events


def gpu_trace(steps=5, **of_each):
    """A prefill still running on the device while decode is dispatched, then `steps` steps."""
    events = [
        mark("prefill", 0),
        program("prefill", 10_000),
        host("cuGraphLaunch", 20_000, correlation_id=1),
        host("command_buffer::record", 15_000),
        kernel("gemm", 30_000, STEP_NS, 1, cuda_graph_id=3),
    ]
    for number in range(steps):
        events += decode_step(number, (1 + number) * STEP_NS, **of_each)
    return events


def test_each_steady_step_has_the_launches_of_its_own_dispatch():
    report = summarise(gpu_trace(steps=5))
    assert (report.device, report.steps, report.steady_steps, report.steps_per_dispatch) == ("gpu", 5, 4, 1)
    for figures in (report.per_step, *report.each_dispatch):
        assert (figures.graph_launches, figures.executes, figures.loose_launches, figures.copies) == (
            1,
            1,
            1,
            1,
        )
        assert (figures.updates, figures.records, figures.evictions) == (0, 0, 0)
    assert report.totals.graph_launches == 4


def burst(number, at, *, steps=4):
    """A dispatch of several steps: a graph launch each."""
    events = [mark("decode", at, step_num=number, tokens=steps), program("decode", at + 10_000)]
    for step in range(steps):
        correlation = 100 * (1 + number) + step
        launched = at + 12_000 + 10_000 * step
        events.append(host("cuGraphLaunch", launched, correlation_id=correlation))
        events += [
            kernel(name, at + 200_000 * (1 + step) + 50_000 * index, 50_000, correlation, cuda_graph_id=7)
            for index, name in enumerate(("fusion_0", "wide_x", "wide_x"))
        ]
    return events


def test_a_dispatch_of_several_steps_is_reported_by_the_step():
    kinds = Kinds({"fusion_0": "norm"}, [Call("wide", "attention"), Call("wide", "mlp")])
    events = [event for number in range(3) for event in burst(number, number * STEP_NS)]
    report = summarise(events, {"decode": kinds})
    assert (report.steps, report.steady_steps, report.steps_per_dispatch) == (12, 8, 4)
    assert report.per_step.graph_launches == 1 and report.per_step.wall_ms == pytest.approx(0.25)
    assert [figures.graph_launches for figures in report.each_dispatch] == [4, 4]
    assert kernels_of_kinds(report) == {"norm": 1, "attention": 1, "mlp": 1}
    assert "8 steady steps of 12, up to 4 a dispatch" in report.table()


def test_updates_records_and_evictions_are_counted():
    events = gpu_trace(steps=4, updates=2)
    events += [host("command_buffer::record", 2.2 * STEP_NS), host("EvictCommandBuffers", 2.3 * STEP_NS)]
    report = summarise(events)
    assert (report.per_step.updates, report.totals.records, report.totals.evictions) == (2, 1, 1)
    assert [figures.records for figures in report.each_dispatch] == [0, 1, 0]


def test_a_prefill_that_is_still_running_is_not_part_of_decode():
    report = summarise(gpu_trace(steps=3))
    assert {row["name"] for row in report.top_kernels} == {"fusion_0", "fusion_1", "fusion_2"}


def test_a_prefill_launched_late_by_another_thread_is_not_part_of_decode():
    late = 1.3 * STEP_NS  # inside the first decode step
    events = [
        program("prefill", late, 50_000),
        host("cuGraphLaunch", late + 10_000, correlation_id=77),
        kernel("gemm", late + 20_000, 10_000, 77),
    ]
    report = summarise(gpu_trace(steps=3) + events)
    assert report.totals.graph_launches == 2
    assert "gemm" not in {row["name"] for row in report.top_kernels}


def test_work_between_two_requests_is_not_part_of_decode():
    second = [
        host("cuLaunchKernel", 3.9 * STEP_NS, correlation_id=50),  # a snapshot after the last step
        mark("prefill", 4 * STEP_NS),
        *decode_step(10, 9 * STEP_NS),
        *decode_step(11, 10 * STEP_NS),
    ]
    report = summarise(gpu_trace(steps=3) + second)
    assert (report.steps, report.steady_steps, report.totals.loose_launches) == (5, 3, 3)
    assert report.per_step.wall_ms == pytest.approx(1.0)
    assert report.totals.gap_ms < 3  # the pause between the requests is no gap


def test_busy_time_is_the_union_of_overlapping_streams():
    events = gpu_trace(steps=2, kernels=1)
    other = Event("copy", 1.45 * STEP_NS, 200_000, {"correlation_id": 1000}, "Stream #14(MemcpyD2D)", GPU)
    report = summarise([*events, other])
    assert report.totals.busy_ms == pytest.approx(0.25)  # 1.40 … 1.55 and 1.45 … 1.65
    assert report.totals.gap_ms == pytest.approx(0)


def test_gaps_within_and_between_steps_are_what_the_device_did_not_use():
    report = summarise(gpu_trace(steps=3))
    assert report.per_step.busy_ms == pytest.approx(0.45)
    assert [figures.gap_ms for figures in report.each_dispatch] == [pytest.approx(0.1)] * 2
    assert report.totals.gap_ms == pytest.approx(2.95 - 1.4 - 0.9)  # last end, first start, busy


@pytest.mark.parametrize("name", ["MemcpyD2H", "memcpy32_post", "Memset 0"])
def test_memory_copies_on_the_device_are_no_kernels(name):
    copy = kernel(name, 1.96 * STEP_NS, 1_000, 1600)
    report = summarise([*gpu_trace(steps=2), copy])
    assert (report.totals.kernels, report.totals.device_copies) == (3, 1)
    assert {row["kind"] for row in report.layers} == {"in graph", "copies"}
    assert report.totals.busy_ms == pytest.approx(0.451)


def test_kernels_without_names_are_reported_as_hidden_in_the_graph():
    report = summarise(gpu_trace())
    assert [row["kind"] for row in report.layers] == ["in graph"]
    assert report.hides_names and report.hidden_share == 1
    assert "100%" in report.note and report.note in report.table()


def test_kernels_are_put_to_the_layer_their_scope_names():
    events = gpu_trace(steps=2, kernels=0)
    scopes = {"a": "jit(decode)/attention/qkv/dot:", "b": "jit(decode)/mlp/mul", "c": "jit(decode)/broadcast"}
    for index, (name, scope) in enumerate(scopes.items()):
        start = 1.4 * STEP_NS + 100_000 * index
        events.append(kernel(name, start, 10_000 * (3 - index), 1000, tf_op=scope))
    report = summarise(events)
    assert [(row["kind"], row["share"]) for row in report.layers] == [
        ("attention", pytest.approx(1 / 2)),
        ("mlp", pytest.approx(1 / 3)),
        ("unnamed", pytest.approx(1 / 6)),
    ]
    assert report.note == "" and not report.hides_names  # there is no graph


def kernels_of_kinds(report):
    return {row["kind"]: row["kernels_per_step"] for row in report.layers}


def test_kernels_in_a_graph_are_named_after_the_compiled_text():
    kinds = Kinds({"fusion_0": "attention", "fusion_1": "mlp", "fusion_2": "mlp"})
    report = summarise(gpu_trace(), {"decode": kinds})
    assert kernels_of_kinds(report) == {"mlp": 2, "attention": 1}
    assert report.note == "" and not report.hides_names


def hand_written(order=(0, 1, 2, 3)):
    """Two steps: a fusion, then four runs of one kernel, listed in another order than they ran in."""
    events = gpu_trace(steps=2, kernels=1)
    at = STEP_NS + 600_000
    runs = [kernel("mosaic_matmul", at + 10_000 * i, 5_000 * (1 + i), 1000, cuda_graph_id=7) for i in order]
    return events + runs


def test_kernels_written_by_hand_are_known_by_their_place_in_the_program():
    calls = [Call("", kind) for kind in ("attention", "attention", "mlp", "lm_head")]
    report = summarise(hand_written(order=(3, 1, 0, 2)), {"decode": Kinds({"fusion_0": "norm"}, calls)})
    assert {row["kind"]: row["ms_per_step"] for row in report.layers} == {
        "norm": pytest.approx(0.15),
        "lm_head": pytest.approx(0.02),
        "mlp": pytest.approx(0.015),
        "attention": pytest.approx(0.015),  # 5 and 10 µs
    }


def test_kernels_written_by_hand_are_known_by_the_name_of_their_call():
    names = ["decode_q4_k_8x8_b1_main", "gemm_sm90", "decode_q4_k_8x8_b16", "gemm_sm90", "decode_q4_k_8x8_b1"]
    calls = [
        Call("decode_q4_k_8x8_b1", "mlp"),
        Call("", "attention"),
        Call("decode_q4_k_8x8_b16", "lm_head"),
        Call("", "delta"),
    ]
    assert Kinds({}, calls).of_calls(names) == ["mlp", "attention", "lm_head", "delta", "mlp"]


def test_calls_of_one_name_in_two_kinds_are_told_apart_by_their_place():
    calls = [Call("wide", "attention"), Call("norm_2", "norm"), Call("wide", "mlp")]
    assert Kinds({}, calls).of_calls(["wide_x", "wide_x", "norm_2"]) == ["attention", "mlp", "norm"]
    assert Kinds({}, calls).of_calls(["wide_x", "wide_x", "wide_x"]) == [None] * 3


def test_kernels_written_by_hand_that_cannot_be_placed_are_known_by_a_layer_kind_in_their_name():
    events = hand_written()
    names = [f"decode_{kind}_12_2_b1" for kind in ("attention", "delta", "q4_k")]
    events += [kernel(name, STEP_NS + 700_000, 1_000, 1000, cuda_graph_id=7) for name in names]
    calls = [Call("", "attention"), Call("", "mlp")]
    report = summarise(events, {"decode": Kinds({"fusion_0": "norm"}, calls)})
    assert kernels_of_kinds(report) == {"norm": 1, "attention": 1, "delta": 1, "in graph": 5}


def test_a_kernel_launched_beside_the_graph_takes_nobody_s_place():
    peek = kernel("wrapped_concatenate", STEP_NS + 650_000, 1_000, 1000)
    calls = [Call("", kind) for kind in ("attention", "attention", "mlp", "lm_head")]
    report = summarise([*hand_written(), peek], {"decode": Kinds({"fusion_0": "norm"}, calls)})
    assert kernels_of_kinds(report) == {"norm": 1, "attention": 2, "mlp": 1, "lm_head": 1, "unnamed": 1}


def test_each_prefill_chunk_has_the_work_that_it_launched_however_late():
    events = [mark("prefill", 0), mark("prefill", 200_000), *decode_step(0, STEP_NS)]
    for number, (launched, ran) in enumerate([(150_000, 300_000), (STEP_NS + 5_000, 800_000)]):
        events.append(program("prefill", launched, 4_000))
        events.append(host("cuGraphLaunch", launched + 1_000, correlation_id=number))
        events.append(kernel("gemm", ran, 100_000 * (1 + number), number, tf_op="jit(prefill)/mlp/dot"))
    report = summarise(events)
    chunks = report.prefill.each_dispatch
    assert [one.graph_launches for one in chunks] == [1, 1]
    assert [one.busy_ms for one in chunks] == [pytest.approx(0.1), pytest.approx(0.2)]
    assert report.prefill.layers[0]["kind"] == "mlp" and report.prefill.layers[0]["kernels_per_step"] == 1
    assert report.totals.graph_launches == 1
    assert "prefill: 2 chunk(s)" in report.table()


def test_traffic_gives_each_layer_kind_its_speed_and_the_step_its_share_of_the_copy_rate():
    kinds = Kinds({"fusion_0": "attention", "fusion_1": "mlp", "fusion_2": "mlp"})
    report = summarise(gpu_trace(), {"decode": kinds})
    report.add_traffic({"attention": 150e3, "mlp": 150e3}, bytes_per_second=2e9)
    rows = {row["kind"]: row for row in report.layers}
    assert rows["attention"]["gb_per_s"] == pytest.approx(1)  # 150 kB in 150 µs
    assert rows["attention"]["percent_of_copy"] == pytest.approx(50)
    assert rows["mlp"]["gb_per_s"] == pytest.approx(0.5)
    assert rows["busy"]["percent_of_copy"] == pytest.approx(100 / 3)  # 300 kB in 450 µs
    assert "percent of copy" in report.table() and "MB" not in report.table()


def test_a_layer_kind_that_moves_nothing_has_no_speed():
    report = summarise(gpu_trace())
    report.add_traffic({}, bytes_per_second=2e9)
    assert [row["gb_per_s"] for row in report.layers] == [None, None]


def test_host_marks_are_counted_over_the_whole_trace_as_well():
    events = [host("EvictCommandBuffers", 0.5 * STEP_NS), *gpu_trace(steps=3)]
    report = summarise(events)
    assert (report.whole["evictions"], report.totals.evictions) == (1, 0)
    assert (report.whole["graph_launches"], report.whole["records"]) == (4, 1)


def test_only_the_ten_most_expensive_kernels_are_listed_dearest_first():
    events = gpu_trace(steps=2, kernels=0)
    events += [kernel(f"k{i}", 1.4 * STEP_NS + 1000 * i, 100 + i, 1000) for i in range(15)]
    assert [row["name"] for row in summarise(events).top_kernels] == [f"k{i}" for i in range(14, 4, -1)]


def test_programs_are_counted_over_the_whole_trace():
    programs = {row["name"]: row for row in summarise(gpu_trace(steps=5)).programs}
    assert {name: row["executions"] for name, row in programs.items()} == {
        "prefill": 1,
        "decode": 5,
        "peek": 5,
    }
    assert programs["decode"]["graph_launches"] == 5
    assert (programs["peek"]["graph_launches"], programs["peek"]["loose_launches"]) == (0, 5)


def test_a_trace_of_a_single_step_counts_that_step():
    report = summarise(gpu_trace(steps=1))
    assert (report.steps, report.steady_steps, report.per_step.graph_launches) == (1, 1, 1)


def test_a_trace_without_decode_says_so():
    report = summarise(gpu_trace(steps=0))
    assert (report.steps, report.steady_steps) == (0, 0)
    assert "no decode step" in report.table()
    assert summarise([]).steps == 0


def test_the_report_is_plain_json_and_a_table_with_every_figure():
    report = summarise(gpu_trace())
    assert json.loads(json.dumps(report.as_dict()))["per_step"]["graph_launches"] == 1
    for word in ("graph launches", "busy ms", "gap ms", "dispatch ms", "fusion_0", "peek", "in graph"):
        assert word in report.table()


def test_a_scope_is_the_innermost_known_name_of_a_path():
    assert kind_of("jit(decode)/mlp/norm/mul:") == "norm"
    assert kind_of("jit(decode)/vmap(attention)/dot_general") == "attention"
    assert kind_of("jit(decode)/while/body/qkv/add") is None
    assert kind_of("") is None


def test_a_fusion_takes_the_scope_of_what_it_fused():
    text = """HloModule jit_decode

%inner (p: f32[4]) -> f32[4] {
  %sin.0 = f32[4]{0} sine(%p), metadata={op_name="jit(decode)/mlp/sin"}
}

ENTRY %main (s: f32[4]) -> f32[4] {
  %loop_fusion.3 = f32[4]{0} fusion(%s), kind=kLoop, calls=%inner, metadata={op_name="jit(decode)/div"}
  ROOT %dot.1 = f32[4]{0} fusion(%s), calls=%other, metadata={op_name="jit(decode)/attention/dot"}
}
"""
    assert kinds_from_hlo(text).by_name == {"sin_0": "mlp", "loop_fusion_3": "mlp", "dot_1": "attention"}


def test_calls_of_kernels_written_by_hand_are_listed_in_the_order_they_run():
    text = """HloModule jit_decode

%dynamic-slice-fusion (p: f32[4]) -> f32[4] {
  ROOT %run.9 = f32[4]{0} custom-call(%p), metadata={op_name="jit(decode)/mlp/jit(f)/decode_q4_k_8x8_b1/run"}
}

ENTRY %main (s: f32[4]) -> f32[4] {
  %run.7 = f32[4]{0} custom-call(%s), metadata={op_name="jit(decode)/attention/qkv/jit(f)/attend/run"}
  %loop_fusion = f32[4]{0} fusion(%s), calls=%inner, metadata={op_name="jit(decode)/norm/mul"}
  %dynamic_slice_fusion.1 = f32[4]{0} fusion(%s), kind=kCustom, calls=%dynamic-slice-fusion
  ROOT %gemm.1 = f32[4]{0} custom-call(%s), metadata={op_name="jit(decode)/lm_head/dot_general"}
}
"""
    kinds = kinds_from_hlo(text)
    assert kinds.by_name["loop_fusion"] == "norm" and "dynamic_slice_fusion_1" not in kinds.by_name
    assert list(kinds.calls) == [
        Call("attend", "attention"),
        Call("decode_q4_k_8x8_b1", "mlp"),
        Call("", "lm_head"),
    ]


def test_calls_in_the_body_of_a_loop_are_listed_once():
    text = """HloModule jit_decode

%body.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %run.7 = f32[4]{0} custom-call(%p), metadata={op_name="jit(decode)/while/body/attention/attend/run"}
  %run.8 = f32[4]{0} custom-call(%p), metadata={op_name="jit(decode)/while/body/mlp/wide/run"}
}

ENTRY %main (s: f32[4]) -> f32[4] {
  %while.2 = (s32[], f32[4]{0}) while(%s), condition=%condition.1, body=%body.1
}
"""
    assert list(kinds_from_hlo(text).calls) == [Call("attend", "attention"), Call("wide", "mlp")]


# ---- a real trace


@jax.jit
def _decode(x):
    with jax.named_scope("attention"):
        x = jnp.tanh(x @ x)
    with jax.named_scope("mlp"):
        return (x @ x.T + jnp.sin(x)) / 10


def _run(steps):
    x = jnp.full((64, 64), 0.1)
    for number in range(steps):
        with jax.profiler.StepTraceAnnotation("decode", step_num=number, tokens=1):
            x = _decode(x)
    return x.block_until_ready()


def test_a_real_trace_reports_every_step_and_its_layers(tmp_path):
    _run(1)
    compiled = _decode.lower(jnp.zeros((64, 64))).compile().as_text()
    with trace.record(tmp_path, lambda: {"decode": compiled}) as report:
        _run(20)
    assert (report.steps, report.steady_steps) == (20, 19)
    assert report.per_step.kernels > 0 and report.totals.busy_ms > 0
    assert {"attention", "mlp"} <= {row["kind"] for row in report.layers}
    assert report.path.endswith(".xplane.pb")
    if jax.default_backend() == "cpu":
        assert report.per_step.graph_launches is None and "n/a" in report.table()


def test_tokens_are_the_same_with_and_without_a_trace(tmp_path):
    plain = _run(5)
    with trace.record(tmp_path):
        traced = _run(5)
    assert (plain == traced).all()


def test_an_error_inside_keeps_the_file_and_lets_the_next_trace_start(tmp_path):
    with pytest.raises(ZeroDivisionError), trace.record(tmp_path) as report:
        _run(2)
        1 / 0  # noqa: B018
    assert trace.read_events(next(tmp_path.glob("plugins/profile/*/*.xplane.pb")))
    assert report.steps == 0
    with trace.record(tmp_path / "again") as report:
        _run(3)
    assert report.steps == 3


def test_a_second_trace_at_the_same_time_is_refused_and_the_first_goes_on(tmp_path):
    with trace.record(tmp_path) as report:
        with pytest.raises(JaxserveError, match="already running"), trace.record(tmp_path / "other"):
            pass
        _run(3)
    assert report.steps == 3


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), trace.record(tmp_path / "file" / "trace"):
        pytest.fail("the block must not run")
    with trace.record(tmp_path / "fine"):
        pass


def test_copy_bandwidth_is_that_of_memory():
    found = bandwidth.measured_copy_bandwidth(jax.devices()[0])
    assert 1e9 < found < 2e13  # between an old laptop and twice the fastest GPU


def test_programs_without_graphs_stand_in_for_those_that_ran_inside_the_block_only():
    engine = scripted(slots=2, context=128, reuse=False)
    params = jaxserve.SamplingParams(max_tokens=5, ignore_eos=True)
    runner = engine._runner
    runner.ran.clear()
    before = engine.generate([1, 2, 3], params).tokens
    programs, last = dict(runner.programs), set(runner.ran)
    assert {name[0] for name in last} == {"decode", "prefill"}
    with trace.graphs_off(runner):
        replaced = {name for name in programs if runner.programs[name] is not programs[name]}
        assert engine.generate([1, 2, 3], params).tokens == before
    assert replaced == last
    assert runner.programs == programs


def test_the_texts_of_an_engine_name_the_layers_of_both_phases():
    engine = scripted(slots=2, context=128, reuse=False)
    engine.generate([1, 2, 3])
    texts = engine._runner.program_texts()
    assert set(texts) == {"decode", "prefill"}
    for text in texts.values():
        assert {"attention", "mlp", "lm_head", "sampling"} <= set(kinds_from_hlo(text).by_name.values())
