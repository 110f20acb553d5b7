"""The functions of a step, driven phase by phase.

The reference for gradients is the derivative of the complete model as one function in float64 (the
fixture `whole`); updates are compared with AdamW in NumPy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.schema import (
    ComponentConfig,
    ComponentsConfig,
    LanguageConfig,
    LanguageObjectiveConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ProjectorComponents,
    ProjectorConfig,
    VisionConfig,
)
from jaxmllm.data.rows.masks import AttentionSpec, finish_encoder_row, finish_language_row
from jaxmllm.models.compose import build_model
from jaxmllm.models.rows import EncoderRows, LanguageRows, TokenPool
from jaxmllm.row_format import RowFormat
from jaxmllm.training.objectives.flow import FlowSums
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.step_functions import StepFunctions, TrainState
from sharding.mesh import make_mesh
from tests.support import EXHAUSTIVE

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
RANKS = 4
SLOTS = 64
BLOCK = 32
VOCABULARY = 30
SOURCES = 2
# A row of 64 patches becomes 16 tokens
TOKENS = 16
PATCHES = 64
CONFIG = ModelConfig(
    language=LanguageConfig(
        width=8, layers=1, heads=2, kv_heads=2, head_size=8, mlp_width=12, loss_chunk=32
    ),
    vision=VisionConfig(width=8, layers=1, heads=2, mlp_width=12, patch_size=2),
)
FROZEN = ComponentConfig(freeze=True, compute_dtype="float64")
WIDE = ComponentConfig(compute_dtype="float64")


def projector_config(settings):
    """The settings of a component as those of a projector, which has no `remat`."""
    return ProjectorConfig(**settings.model_dump(exclude={"remat"}))


def make_step(mesh=MESH, vision=WIDE, projector=WIDE, language=WIDE, **optimizer):
    """A step of a tiny vision-language model; by default all components compute in float64."""
    projectors = ProjectorComponents(vision=projector_config(projector))
    settings = ComponentsConfig(vision=vision, language=language, projector=projectors)
    model = build_model(CONFIG, VOCABULARY, settings, mesh)
    return StepFunctions(
        model,
        OptimizerConfig(**({"learning_rate": 0.1} | optimizer)),
        decay_steps=20,
        sources=SOURCES,
    )


def randomized(step, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(dtype),
        step.model.abstract("float32"),
    )


def encoder_rows(seed):
    """Rows of 64 patches: images of 40 and of 16 patches, then padding."""
    rng = np.random.default_rng(seed)
    segments = np.tile(np.repeat([1, 2, 0], [40, 16, 8]), (RANKS, 1)).astype(np.int32)
    valid = np.ones((RANKS, TOKENS), bool)
    row = {
        "features": rng.integers(0, 256, (RANKS, PATCHES, 12)).astype(np.uint8),
        "segments": segments,
        "positions": rng.integers(0, 9, (RANKS, PATCHES, 2)).astype(np.int32),
        "valid": valid,
        "failed": np.zeros(RANKS, np.int32),
    }
    row_format = RowFormat(
        12,
        np.dtype(np.uint8),
        slots_per_token=PATCHES // TOKENS,
        stride=1,
        alignment=1,
        axes=(1, 2),
    )
    finish_encoder_row(row, AttentionSpec({"vision": BLOCK}), "vision", row_format)
    return EncoderRows.of(row)


def language_rows(seed):
    """Rows of two examples; both read an image of a pool of two microbatches.

    Rows of odd and of even seeds read different halves of the pool, so no slot has two readers.
    """
    rng = np.random.default_rng(seed)
    segments = np.tile(np.repeat([1, 2, 0], [25, 35, 4]), (RANKS, 1)).astype(np.int32)
    media = np.full((RANKS, SLOTS), -1, np.int32)
    tokens_per_image = TOKENS // 2
    first_token = tokens_per_image * (1 - seed % 2)
    media[:, 3 : 3 + tokens_per_image] = first_token + rng.permutation(tokens_per_image)
    media[:, 27 : 27 + tokens_per_image] = TOKENS + first_token + rng.permutation(tokens_per_image)
    targets = np.where((segments > 0) & (rng.random(segments.shape) < 0.6), 1, -1)
    targets *= np.where(targets > 0, rng.integers(0, VOCABULARY, targets.shape), 1)
    row = {
        "tokens": rng.integers(0, VOCABULARY, segments.shape).astype(np.int32),
        "targets": targets.astype(np.int32),
        "segments": segments,
        "positions": rng.integers(0, 40, (RANKS, SLOTS, 3)).astype(np.int32),
        "media": media,
        "sources": np.tile(np.array([1, 0, -1], np.int32), (RANKS, 1)),
        "groups": np.zeros_like(segments),
    }
    finish_language_row(row, AttentionSpec({"language": BLOCK}))
    return LanguageRows.of(row)


def empty_pool():
    return TokenPool(np.zeros((RANKS, 2 * TOKENS, 8)), np.zeros((RANKS, 2 * TOKENS), np.int32))


def zero_sums(dtype=np.float64):
    return Sums(*np.zeros((4, RANKS, SOURCES), dtype))


def zeros_like(tree):
    return jax.tree.map(np.zeros_like, tree)


def stacked(microbatches):
    return jax.tree.map(lambda *arrays: np.stack(arrays), *microbatches)


IMAGES = (encoder_rows(1), encoder_rows(2))
TEXT = (language_rows(3), language_rows(4))


# ---------------------------------------------------------------------------- gradients in phases


class Driver:
    """The compiled functions of a step, run on two encoder and two language microbatches.

    The microbatches share one pool, and the exchange between encoder and language rows is the
    identity.
    """

    def __init__(self, step, loss_and_grad=None):
        self.step = step
        self.encode = jax.jit(lambda *args: step.encode("vision", *args))
        self.encode_grad = jax.jit(lambda *args: step.encode_grad("vision", *args))
        self.loss_and_grad = loss_and_grad or jax.jit(step.language_loss_and_grad)

    def run(self, params, images=IMAGES, scale=0.01):
        """Gradients, sums, number of failed images and what was kept for the backward pass."""
        with jax.enable_x64(True):
            pool = empty_pool()
            kept_inputs = []
            failed = np.int32(0)
            for m, rows in enumerate(images):
                pool, features, failed = self.encode(
                    params, rows, pool, np.int32(m * TOKENS), failed
                )
                kept_inputs.append(rows if features is None else features)
            sums = zero_sums()
            grads = zeros_like(self.step.model.trainable.split(params)[0])
            phase_grads = {name: grads[name] for name in self.step.trainable_of("language")}
            for rows in TEXT:
                pool, phase_grads, sums = self.loss_and_grad(
                    params, rows, pool, scale, phase_grads, sums
                )
            grads |= phase_grads
            phase_grads = {name: grads[name] for name in self.step.trainable_of("vision")}
            for m, kept_input in enumerate(kept_inputs):
                if phase_grads:
                    phase_grads = self.encode_grad(
                        params, kept_input, pool.tokens, np.int32(m * TOKENS), phase_grads
                    )
            return jax.device_get((grads | phase_grads, sums, failed, kept_inputs))


@pytest.fixture(scope="module")
def driver():
    return Driver(make_step())


@pytest.fixture(scope="module")
def whole():
    """Loss and gradients of the same step as one function of all parameters.

    It runs on one device, without pools or chunks.
    """
    step = make_step(make_mesh({"data": 1}, jax.devices()[:1]))
    model = step.model
    params = randomized(step)

    def objective(params):
        def encoded(rows):
            return model.project(
                params, "vision", model.features(params, "vision", rows), rows.places
            )

        def total(rows):
            media = jnp.take_along_axis(pool, jnp.maximum(rows.media, 0)[..., None], axis=1)
            hidden, head = model.hidden(params, rows, media)
            log_probabilities = jax.nn.log_softmax(hidden @ head.matrix)
            target_log_probabilities = jnp.take_along_axis(
                log_probabilities, jnp.maximum(rows.targets, 0)[..., None], axis=-1
            )[..., 0]
            return jnp.where(rows.targets >= 0, target_log_probabilities, 0).sum()

        first_tokens, second_tokens = jax.lax.map(encoded, stacked(IMAGES))
        pool = jnp.concatenate([first_tokens, second_tokens], axis=1)
        return -0.01 * jax.lax.map(total, stacked(TEXT)).sum()

    with jax.enable_x64(True):
        loss, grads = jax.jit(jax.value_and_grad(objective))(params)
        return params, float(loss), jax.device_get(grads)


def assert_trees_close(got, want, tolerance=1e-10):
    """Each entry differs by at most `tolerance` of the largest entry of its leaf."""
    flat = jax.tree.leaves_with_path(want)
    for (path, expected), value in zip(flat, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            value, expected, rtol=0, atol=tolerance * abs(expected).max(), err_msg=name
        )


@pytest.fixture(scope="module")
def phased(driver, whole):
    return driver.run(whole[0])


def test_phases_add_up_to_the_derivative_of_the_whole(whole, phased):
    _, loss, expected = whole
    grads, sums, _, _ = phased
    np.testing.assert_allclose(0.01 * sums.loss.sum(), loss, rtol=1e-10)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    assert_trees_close(grads, expected)


EVERYTHING = ("attention", "projections", "mlp")


@pytest.fixture(scope="module")
def in_float32():
    """(gradients of a step in float32 by the `remat` of tower and decoder, those without any)."""

    def gradients(remat):
        settings = ComponentConfig(remat=remat)
        step = make_step(vision=settings, projector=ComponentConfig(), language=settings)
        return Driver(step).run(randomized(step, dtype=np.float32))[0]

    return gradients, gradients("none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat",
    [
        "full",
        *(
            pytest.param(remat_setting, marks=EXHAUSTIVE)
            for remat_setting in ("dots", ("attention",), ("projections",), ("mlp",), EVERYTHING)
        ),
    ],
)
def test_what_is_computed_again_changes_no_gradient(in_float32, remat):
    gradients, kept_grads = in_float32
    assert_trees_close(gradients(remat), kept_grads, 1e-6)


def test_sums_count_targets_and_examples_by_source(phased):
    """The reference counts targets in rows, where segments 1 and 2 have sources 1 and 0."""
    _, sums, failed, _ = phased
    for source, segment in ((1, 1), (0, 2)):
        for rank in range(RANKS):
            count = sum(
                (rows.targets[rank][rows.segments[rank] == segment] >= 0).sum() for rows in TEXT
            )
            assert sums.targets[rank, source] == count
            assert sums.examples[rank, source] == len(TEXT)
    assert failed == 0


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        ({"vision": FROZEN}, {"projector.vision", "language"}),
        pytest.param({"projector": FROZEN, "language": FROZEN}, {"vision"}, marks=pytest.mark.slow),
        ({"vision": FROZEN, "projector": FROZEN}, {"language"}),
    ],
    ids=["tower", "all_but_tower", "encoder"],
)
def test_freezing_leaves_the_other_gradients_as_they_are(driver, whole, frozen, trained):
    params, _, expected = whole
    step = make_step(**frozen)
    grads, _, _, kept_inputs = Driver(
        step, None if "language" in frozen else driver.loss_and_grad
    ).run(params)
    assert set(grads) == trained
    assert_trees_close(grads, {name: expected[name] for name in trained})
    assert step.keeps_features("vision") == (
        "projector.vision" in trained and "vision" not in trained
    )
    assert all(
        isinstance(kept_input, EncoderRows) != step.keeps_features("vision")
        for kept_input in kept_inputs
    )


@pytest.mark.slow
def test_parameters_trained_by_pattern_have_the_gradients_that_all_have(driver, whole):
    """Parameters that match no pattern get neither gradients nor moments, and do not move.

    Trained are biases of the tower, a matrix of the projector, the decoder's MLPs and its head.
    """
    params, _, expected = whole
    vision = ComponentConfig(compute_dtype="float64", train=("*bias",))
    projector = ComponentConfig(compute_dtype="float64", train=("mlp.down",))
    language = ComponentConfig(compute_dtype="float64", train=("layers.mlp.*", "head"))
    step = make_step(vision=vision, projector=projector, language=language)
    grads, _, _, _ = Driver(step).run(params)
    trained, frozen = step.model.trainable.split(expected)
    assert trained["projector.vision"].keys() == {"mlp"} and trained["projector.vision"][
        "mlp"
    ].keys() == {"down"}
    assert trained["language"].keys() == {"layers", "head"} and "patch" not in trained["vision"]
    assert_trees_close(grads, trained)

    with jax.enable_x64(True):
        state = jax.device_get(step.init(params))
        new, _ = jax.device_get(
            jax.jit(step.update)(state, grads, make_sums(80.0), np.float64(80.0), np.int32(0))
        )
    moments = {name: optimizer[0].mu for name, optimizer in new.optimizer.items()}
    assert jax.tree.structure(moments) == jax.tree.structure(trained)
    changed, unchanged = step.model.trainable.split(
        jax.tree.map(lambda new, old: (new != old).any(), new.params, params)
    )
    assert jax.tree.structure(changed) == jax.tree.structure(trained) and all(
        jax.tree.leaves(changed)
    )
    assert jax.tree.structure(unchanged) == jax.tree.structure(frozen) and not any(
        jax.tree.leaves(unchanged)
    )


def test_an_undecodable_image_takes_the_loss_of_its_whole_example(driver, whole):
    """The second image of rank 2 fails in the first microbatch; its tokens 3 and 11 are invalid.

    Example 1 of every language row of that rank reads one of them, so it has no loss. The reference
    is the same step with the example's targets masked by hand.
    """
    params = whole[0]
    valid = IMAGES[0].valid.copy()
    failed = IMAGES[0].failed.copy()
    valid[2, [3, 11]], failed[2] = False, 1
    _, sums, failed_count, _ = driver.run(
        params, (IMAGES[0]._replace(valid=valid, failed=failed), IMAGES[1])
    )
    assert failed_count == 1
    is_masked = np.zeros((RANKS, SOURCES))
    is_masked[2, 1] = 1  # segment 1 has source 1
    np.testing.assert_array_equal(sums.examples, len(TEXT) * (1 - is_masked))
    assert sums.targets[2, 1] == 0 and sums.loss[2, 1] == 0 and sums.targets[2, 0] > 0
    with jax.enable_x64(True):
        zero_grads = {"language": zeros_like(params["language"])}
        pool = empty_pool()
        pool = pool._replace(valid=pool.valid + 1)
        masked_targets = [
            np.where((rows.segments == 1) & (np.arange(RANKS)[:, None] == 2), -1, rows.targets)
            for rows in TEXT
        ]
        broken_pool = pool._replace(
            valid=pool.valid * (np.arange(2 * TOKENS) != 3) ** (np.arange(RANKS)[:, None] == 2)
        )
        arguments = 0.01, zero_grads, zero_sums()
        by_hand = driver.loss_and_grad(
            params, TEXT[0]._replace(targets=masked_targets[0]), pool, *arguments
        )
        by_flag = driver.loss_and_grad(params, TEXT[0], broken_pool, *arguments)
        evaluated = jax.jit(driver.step.evaluate)(params, TEXT[0], broken_pool, zero_sums())
    by_flag, by_hand = ((pool.tokens, *sums) for pool, *sums in jax.device_get((by_flag, by_hand)))
    assert_trees_close(by_flag, by_hand, 1e-13)
    assert_trees_close(jax.device_get(evaluated), jax.device_get(by_flag[2]), 1e-13)


def test_rows_without_a_target_add_exactly_nothing(driver, whole):
    """Zero is exact, so padding rows cannot change a step by rounding."""
    params = whole[0]
    rows = TEXT[0]._replace(targets=np.full_like(TEXT[0].targets, -1))
    with jax.enable_x64(True):
        pool = empty_pool()
        filled_pool = pool._replace(tokens=pool.tokens + 1)
        pool, grads, sums = driver.loss_and_grad(
            params,
            rows,
            filled_pool,
            0.01,
            {"language": zeros_like(params["language"])},
            zero_sums(),
        )
    read_slots = np.unique(rows.media[rows.media >= 0])
    assert not np.any(pool.tokens[:, read_slots]) and len(read_slots) == TOKENS
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((grads, sums)))


# ---------------------------------------------------------------------------- update


OPTIMIZER = {
    "learning_rate": 0.1,
    "warmup_steps": 5,
    "weight_decay": 0.2,
    "beta1": 0.8,
    "beta2": 0.9,
    "epsilon": 1e-6,
    "clip_norm": 0.5,
}
EMA = 0.4


def make_sums(targets):
    """Sums of a mean loss of 3 over this many targets, spread evenly over ranks and sources."""
    return Sums(
        *(
            np.full((RANKS, SOURCES), value / RANKS / SOURCES)
            for value in (3.0 * targets, targets, 0.0, 0.0)
        )
    )


@pytest.fixture(scope="module")
def updating():
    """The update of a step, compiled, with a first state and some gradients.

    The tower is frozen, the projector has a lower learning rate, and the decoder is averaged.
    """
    step = make_step(
        vision=FROZEN,
        projector=ComponentConfig(compute_dtype="float64", learning_rate_scale=0.25),
        language=ComponentConfig(compute_dtype="float64", ema=EMA),
        **OPTIMIZER,
    )
    params = randomized(step)
    with jax.enable_x64(True):
        state = jax.device_get(step.init(params))
        program = jax.jit(step.update)

    def update(state, grads, sums, planned=80.0, failed=0):
        with jax.enable_x64(True):
            return jax.device_get(
                program(state, grads, sums, np.float64(planned), np.int32(failed))
            )

    grads = {name: randomized(step, 7)[name] for name in ("language", "projector.vision")}
    return update, state, grads


def test_only_trainable_components_have_moments(updating):
    _, state, grads = updating
    moments = state.optimizer
    assert set(moments) == set(grads)


def test_update_equals_adamw_by_hand(updating):
    """The reference updates in NumPy: rescaling by masked targets, clipping, warm-up and decay."""
    update, state, grads = updating
    planned = 80.0
    targets = 64.0
    rng = np.random.default_rng(5)
    params = state.params
    m = v = zeros_like(grads)
    for count in range(1, 4):
        step_grads = jax.tree.map(lambda g: g * rng.standard_normal(), grads)
        state, metrics = update(state, step_grads, make_sums(targets), planned)
        step_grads = jax.tree.map(lambda g: g * planned / targets, step_grads)
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(step_grads)))
        clip = min(1, 0.5 / norm)
        step_grads = jax.tree.map(lambda g, clip=clip: g * clip, step_grads)
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, step_grads)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, v, step_grads)
        rate = 0.1 * (0.2 + 0.8 * (count - 1) / 5)

        def stepped(path, p, m, v, count=count, rate=rate):
            component = path[0].key
            name = path[-1].key
            direction = m / (1 - 0.8**count) / (np.sqrt(v / (1 - 0.9**count)) + 1e-6)
            # Vectors and embeddings do not decay
            decay = 0.0 if name.endswith(("bias", "scale", "embedding")) else 0.2
            return p - rate * (0.25 if component == "projector.vision" else 1) * (
                direction + decay * p
            )

        trained = jax.tree.map_with_path(stepped, {name: params[name] for name in grads}, m, v)
        params = params | trained
        assert_trees_close(
            state.params, params, 1e-6 if metrics["learning_rate"].dtype == np.float32 else 1e-10
        )
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-10)
        np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], 3.0, rtol=1e-10)
        assert metrics["masked_targets"] == planned - targets
        assert (state.step, state.skipped) == (count, 0)


def test_averages_of_ten_updates_are_their_definition(updating):
    """One update is skipped; from the sixth on, `ema` is less than the decay of early updates."""
    update, state, grads = updating
    assert state.averages.keys() == {"language"}
    average = state.params["language"]
    assert_trees_close(state.averages["language"], average, 0)
    rng = np.random.default_rng(6)
    for updates in range(10):
        step_grads = jax.tree.map(lambda g: g * rng.standard_normal(), grads)
        state, _ = update(
            state, step_grads if updates != 4 else spoil(step_grads, np.nan), make_sums(80.0)
        )
        decay = 1.0 if updates == 4 else min(EMA, (1 + updates) / (10 + updates))
        average = jax.tree.map(
            lambda a, p, decay=decay: decay * a + (1 - decay) * p, average, state.params["language"]
        )
        assert_trees_close(state.averages["language"], average, 1e-7)
    assert state.skipped == 1


def test_frozen_components_stay_bit_for_bit(updating):
    update, state, grads = updating
    new, _ = update(state, grads, make_sums(80.0))
    assert_trees_close(new.params["vision"], state.params["vision"], 0)
    changed = jax.tree.map(
        lambda new, old: (new != old).any(), new.params["language"], state.params["language"]
    )
    assert all(jax.tree.leaves(changed))


def spoil(grads, value):
    spoiled = jax.tree.map(np.copy, grads)
    spoiled["language"]["norm"]["scale"][3] = value
    return spoiled


@pytest.mark.parametrize("kind", ["nan_gradient", "infinite_gradient", "nan_loss", "no_target"])
def test_what_is_not_finite_skips_the_update_and_is_counted(updating, kind):
    """Parameters and optimizer stay, the step counts as skipped; a finite one ends the streak."""
    update, initial_state, grads = updating
    state, _ = update(initial_state, grads, make_sums(80.0))  # moments are not zero
    sums = make_sums(80.0)
    bad_grads = grads
    if kind == "nan_loss":
        sums = sums._replace(loss=sums.loss * np.nan)
    elif kind == "no_target":
        sums = make_sums(0.0)
    else:
        bad_grads = spoil(grads, np.nan if kind == "nan_gradient" else np.inf)
    skipped_once, metrics = update(state, bad_grads, sums, failed=2)
    skipped_twice, _ = update(skipped_once, bad_grads, sums, failed=1)
    for count, new_state in enumerate((skipped_once, skipped_twice), start=1):
        for name in ("params", "optimizer"):
            assert_trees_close(getattr(new_state, name), getattr(state, name), 0)
        assert (new_state.skipped, new_state.skipped_in_row, new_state.step) == (
            count,
            count,
            1 + count,
        )
    assert (skipped_twice.failed_media, metrics["skipped"], metrics["skipped_in_row"]) == (3, 1, 1)
    recovered, _ = update(skipped_twice, grads, make_sums(80.0))
    assert (recovered.skipped, recovered.skipped_in_row) == (2, 0)


@pytest.mark.parametrize("weight, counts", [(0.0, False), (1.0, True)])
def test_texts_of_a_model_that_learns_drawings_alone_are_no_streak(updating, weight, counts):
    """Nothing counts in the step. If text has a weight, everything in it must have been masked."""
    _, state, grads = updating
    objective = ObjectiveConfig(language=LanguageObjectiveConfig(weight=weight))
    step = dataclasses.replace(make_step(vision=FROZEN), objective=objective)
    zeros = zero_sums(np.float32)
    empty_sums = zeros._replace(drawn=FlowSums(*[zeros.loss] * 4))
    state = step.init(randomized(step, dtype=np.float32))._replace(skipped_in_row=jnp.int32(2))
    grads = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), grads)
    update = jax.jit(
        lambda grads: step.update(state, grads, empty_sums, jnp.zeros(()), jnp.int32(0))[0]
    )
    new_state = update(grads)
    assert (new_state.skipped, new_state.skipped_in_row) == (1, 2 + counts)
    new_state = update(spoil(grads, np.nan))
    assert (new_state.skipped, new_state.skipped_in_row) == (1, 3)


def test_no_target_is_lost_of_more_than_a_real_number_counts():
    """2,560 ranks count more than 2**24 targets, beyond which float32 skips integers.

    Each rank counts its own targets exactly, and so does their sum.
    """
    step = make_step(vision=FROZEN)
    params = randomized(step, dtype=np.float32)
    state = jax.eval_shape(step.init, params)
    grads = {name: params[name] for name in ("language", "projector.vision")}
    update = jax.jit(lambda *arguments: step.update(*arguments)[1]["masked_targets"])
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    for seed in range(3):
        targets = np.random.default_rng(seed).integers(8192, 16384, (2560, SOURCES))
        sums = Sums(np.ones_like(targets, np.float32), *[np.float32(targets)] * 3)
        planned = np.float32(targets.sum())
        assert update(state, grads, sums, planned, np.int32(0)) == 0
        assert update(state, grads, sums, planned + 1024, np.int32(0)) == 1024


def test_loss_by_source(updating):
    update, state, grads = updating
    sums = zero_sums()
    sums.loss[:, 0], sums.targets[:, 0] = [1, 2, 3, 4], [5, 5, 5, 5]
    _, metrics = update(state, grads, sums, planned=20.0)
    np.testing.assert_allclose(metrics["loss_by_source"], [0.5, 0])
    np.testing.assert_array_equal(metrics["targets_by_source"], [20, 0])
    np.testing.assert_allclose(metrics["loss"], 0.5)


def test_the_state_is_a_checkpoints_tree(updating):
    state = updating[1]
    assert isinstance(state, TrainState)
    assert [
        int(x) for x in (state.step, state.skipped, state.skipped_in_row, state.failed_media)
    ] == [0, 0, 0, 0]
