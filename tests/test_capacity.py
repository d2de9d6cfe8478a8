"""How slots, context and bytes relate, and what "auto" makes of it."""

import jax
import pytest

import jaxserve
from jaxserve import OutOfMemory, capacity
from jaxserve.capacity import SlotCost, auto_slots, check_memory, free_memory, plan
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import open_gguf
from jaxserve.state import state_nbytes
from tests.engines import scripted_path
from tests.oracle import tiny_path

MODELS = {"attention": "llama-f32", "hybrid": "qwen35-mtp-bf16"}
MIB = 2**20

each_model = pytest.mark.parametrize("name", MODELS.values(), ids=MODELS)


def cost(name: str = "llama-f32", kv_dtype: str = "float16") -> SlotCost:
    return SlotCost(read_config(open_gguf(tiny_path(name))), kv_dtype)


@each_model
@pytest.mark.parametrize("context", [64, 4096, 100_000])
def test_slots_cost_what_the_state_takes(name, context):
    one = cost(name)
    shape = dict(context=context, kv_dtype="float16")
    expected = state_nbytes(one.config, slots=7, **shape) - state_nbytes(one.config, slots=3, **shape)
    assert 4 * one.nbytes(context) == expected


@each_model
def test_a_slot_is_a_fixed_part_and_one_for_every_token(name):
    one = cost(name)
    assert one.nbytes(8192) == one.fixed + 8192 * one.token
    assert cost(name, "float32").token > one.token


def test_recurrent_layers_cost_the_same_at_any_context():
    attention, hybrid = (cost(name) for name in MODELS.values())
    assert hybrid.fixed / hybrid.token > attention.fixed / attention.token


def test_as_many_slots_fit_as_their_bytes():
    one = cost()
    assert one.slots(1024, 5 * one.nbytes(1024)) == 5
    assert one.slots(1024, 5 * one.nbytes(1024) - 1) == 4
    assert one.slots(1024, -1) == 0


@pytest.mark.parametrize(
    ("platform", "fitting", "expected"),
    [
        ("gpu", 0, 1),
        ("gpu", 1, 1),
        ("gpu", 3, 2),
        ("gpu", 63, 32),
        ("gpu", 64, 64),
        ("gpu", 900, 64),
        ("cpu", 900, 8),
    ],
)
def test_auto_is_a_power_of_two_that_fits_at_most_64(platform, fitting, expected):
    one = cost()
    free = -int(-fitting * one.nbytes(1024) // capacity.STATE_SHARE[platform])
    assert auto_slots(one, 1024, free, platform) == expected


def test_a_plan_has_a_row_for_every_context():
    one = cost()
    rows = plan(one, [512, 2048], 100 * one.nbytes(2048), "gpu")
    assert [row["context"] for row in rows] == [512, 2048]
    assert [row["slot_bytes"] for row in rows] == [one.nbytes(512), one.nbytes(2048)]
    assert rows[1]["slots_that_fit"] == 100 and rows[0]["slots_that_fit"] > 100
    assert [row["slots_auto"] for row in rows] == [64, 64]


def test_what_cannot_fit_is_refused_with_both_numbers(monkeypatch):
    file = open_gguf(tiny_path("llama-f32"))
    monkeypatch.setattr(capacity, "free_memory", lambda device: 10 * MIB)
    shape = dict(slots=1, kv_dtype="float16")
    check_memory(file, cost().config, "float32", context=512, **shape)
    with pytest.raises(OutOfMemory) as caught:
        check_memory(file, cost().config, "float32", context=100_000, **shape)
    assert caught.value.needed > caught.value.available == 10 * MIB


def test_free_memory_is_that_of_the_device():
    device = jax.devices()[0]
    assert 0 < free_memory(device) < 2**45

    class Full:
        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 30}

    assert free_memory(Full()) == 70


def test_an_engine_takes_as_many_slots_as_fit(monkeypatch):
    monkeypatch.setattr(capacity, "MAX_SLOTS", {"cpu": 2, "gpu": 2})
    with jaxserve.Engine.load(scripted_path(), context=64, slots="auto", reproducible=True) as engine:
        assert engine.slots == 2
        assert len(engine.generate_batch([[5], [6], [7]])) == 3
    with pytest.raises(TypeError, match="slots='most'"):
        jaxserve.Engine.load(scripted_path(), slots="most")
