"""A training step one can use: what is trained, in which precision, and that it can be taken apart and put together."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import CONFIG, make_batch, make_model

from draftconf.fast import fused, mx
from draftconf.fast.model import DraftModel
from draftconf.fast.train import Settings, Trainer
from draftconf.reference.config import Choices, DraftConfig, trained_parameters

checkpoint = pytest.importorskip("draftconf.fast.checkpoint", reason="needs safetensors", exc_type=ImportError)
LAYOUTS = [Choices(), Choices(draft_input="eagle3", head="own")]
SETTINGS = Settings(lr=1e-3, weight_decay=0.1)


def rows(batch, *which) -> dict:
    return {name: x[list(which)] for name, x in batch.items()}


def masters(trainer) -> dict:
    return {name: m.detach().clone() for name, m in trainer.masters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_only_the_trained_set_moves(choices, dtype):
    model, batch = make_model(choices, dtype), make_batch(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, SETTINGS)
    losses = [trainer.step([batch])["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert set(trainer.masters) == set(trained_parameters(CONFIG, choices))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= set(trainer.masters)
    assert all(not torch.equal(m, before[name].to(m.dtype)) for name, m in trainer.masters.items())
    assert all(p.grad is None or p is trainer.masters[name] for name, p in trainer.trained.items())


def test_masters_keep_what_bfloat16_would_lose():
    model, batch = make_model(dtype=torch.bfloat16), make_batch(torch.bfloat16)
    trainer = Trainer(model, Settings(lr=1e-6))
    for _ in range(3):
        trainer.step([batch])
    for name, p in trainer.trained.items():
        assert trainer.masters[name].dtype == torch.float32
        assert torch.equal(trainer.masters[name].bfloat16(), p)
    moved = trainer.masters["fc.weight"] != model.fc.weight
    assert moved.float().mean() > 0.5


def test_experts_are_quantised_once_a_step():
    model, batch = make_model(dtype=torch.bfloat16), make_batch(torch.bfloat16)
    trainer = Trainer(model)
    for steps in range(1, 4):
        trainer.step([rows(batch, 0), rows(batch, 1)])
        assert trainer.cache.quantizations == steps


@pytest.mark.parametrize("reduction", ["supervised", "all_slots"])
@pytest.mark.parametrize("layout", ["mtp", "eagle3"])
def test_parts_of_a_batch_add_up_to_the_batch(layout, reduction):
    """One row has a third of the other's supervised slots: a mean of means would be another gradient."""
    choices = Choices(draft_input=layout, reduction=reduction)
    batch = make_batch()
    batch["mask"][1, :5] = False
    whole, parts = (Trainer(make_model(choices), SETTINGS) for _ in range(2))
    expected, got = whole.step([batch]), parts.step([rows(batch, 0), rows(batch, 1)])
    assert torch.equal(expected["counts"], got["counts"])
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
    for name, m in whole.masters.items():
        torch.testing.assert_close(m.grad, parts.masters[name].grad, rtol=1e-9, atol=1e-12)


def _rank(rank: int, folder: str, results: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batch = make_batch()
    batch["mask"][1, :5] = False
    trainer = Trainer(make_model(), SETTINGS, group=dist.group.WORLD)
    told = trainer.step([rows(batch, rank)])
    torch.save((told, masters(trainer)), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_add_up_to_the_batch(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    code = "import sys, test_train; test_train._rank(int(sys.argv[1]), sys.argv[2], sys.argv[2])"
    import subprocess

    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    batch = make_batch()
    batch["mask"][1, :5] = False
    whole = Trainer(make_model(), SETTINGS)
    expected = whole.step([batch])
    (told, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert told["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert torch.equal(told["counts"], expected["counts"])
    for name, m in masters(whole).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], m, rtol=1e-9, atol=1e-12)


def test_clipping_is_over_all_trained_parameters_and_no_others():
    batch = make_batch()
    free, clipped = (Trainer(make_model(), replace(SETTINGS, max_norm=limit)) for limit in (None, 1e-3))
    expected, got = free.step([batch]), clipped.step([batch])
    total = sum(m.grad.square().sum() for m in free.masters.values()).sqrt().item()
    assert expected["grad_norm"] == got["grad_norm"] == pytest.approx(total)
    for name, m in free.masters.items():
        torch.testing.assert_close(clipped.masters[name].grad, m.grad * (1e-3 / total))


def test_gradients_that_are_not_finite_change_nothing():
    model, batch = make_model(), make_batch()
    trainer = Trainer(model, SETTINGS)
    with torch.no_grad():
        model.enorm.weight[3] = torch.nan
    before = masters(trainer)
    with pytest.raises(RuntimeError, match=r"the gradient of [\w.]+ is not finite"):
        trainer.step([batch])
    assert all(torch.equal(m, before[name]) for name, m in masters(trainer).items() if name != "enorm.weight")
    assert trainer.steps == 0


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", LAYOUTS, ids=lambda c: c.draft_input)
def test_resuming_is_going_on_in_every_bit(tmp_path, choices, dtype):
    batch, path = make_batch(dtype), tmp_path / "training.safetensors"
    through = Trainer(make_model(choices, dtype), SETTINGS)
    through.step([batch])
    through.step([batch])
    through.save(path)
    expected = [through.step([batch])["loss"] for _ in range(2)]
    resumed = Trainer(make_model(choices, dtype), SETTINGS)
    resumed.step([make_batch(dtype, documents=False)])  # whatever it did before
    resumed.resume(path)
    assert resumed.steps == 2
    assert [resumed.step([batch])["loss"] for _ in range(2)] == expected
    for name, p in through.model.state_dict().items():
        assert torch.equal(p, resumed.model.state_dict()[name])
    assert all(torch.equal(m, masters(resumed)[name]) for name, m in masters(through).items())


def test_resuming_from_before_the_first_step(tmp_path):
    batch, path = make_batch(torch.bfloat16), tmp_path / "training.safetensors"
    first, second = (Trainer(make_model(dtype=torch.bfloat16), SETTINGS) for _ in range(2))
    first.save(path)
    second.resume(path)
    assert first.step([batch])["loss"] == second.step([batch])["loss"]
    assert all(torch.equal(m, masters(second)[name]) for name, m in masters(first).items())


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    trainer, path = Trainer(make_model(dtype=torch.bfloat16)), tmp_path / "training.safetensors"
    trainer.save(path)
    before = path.read_bytes()

    def torn(tensors, name, metadata):
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", torn)
    with pytest.raises(OSError, match="no space left"):
        trainer.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_resuming_another_training_is_refused_by_field(tmp_path):
    path = tmp_path / "training.safetensors"
    Trainer(make_model(dtype=torch.bfloat16), SETTINGS).save(path)
    other = Trainer(make_model(dtype=torch.bfloat16), replace(SETTINGS, weight_decay=0.2))
    with pytest.raises(checkpoint.CheckpointError, match=r"settings: weight_decay is 0\.1 in .*, here 0\.2"):
        other.resume(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"has dtype torch\.bfloat16; wanted torch\.float32"):
        Trainer(make_model(Choices(), torch.float32), SETTINGS).resume(rewritten(path, "optimizer.master."))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        Trainer(make_model(dtype=torch.bfloat16), SETTINGS).resume(path)


def rewritten(path, without: str) -> Path:
    """The same file less the tensors whose names start so."""
    with checkpoint.safe_open(path, "pt") as file:
        kept, metadata = {n: file.get_tensor(n) for n in file.keys() if not n.startswith(without)}, file.metadata()  # noqa: SIM118
    checkpoint.write_tensors(path.with_name("less.safetensors"), kept, metadata)
    return path.with_name("less.safetensors")


# -- K3's layout ------------------------------------------------------------------------------------------------------


def exported(folder, dtype=torch.bfloat16, choices=LAYOUTS[0], **kwargs) -> DraftModel:
    model = make_model(choices, dtype)
    checkpoint.export_k3(model, folder, **kwargs)
    return model


@pytest.mark.parametrize("rule", ["floor", "even"])
def test_export_packs_what_training_simulated(tmp_path, rule):
    choices = Choices(mx_scale_rule=rule)
    model = exported(tmp_path, choices=choices, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = checkpoint.load_k3(tmp_path, choices)
    for name, p in model.state_dict().items():
        routed = ".experts." in name and "shared" not in name
        expected = mx.fake_quantize(p, "mxfp4", rule) if routed else p
        assert torch.equal(loaded.state_dict()[name], expected), name
    batch, params = make_batch(torch.bfloat16), dict(loaded.named_parameters())
    again = fused.unroll(params, batch, CONFIG, choices)["total_loss"]
    trained = fused.unroll(dict(model.named_parameters()), batch, CONFIG, choices)["total_loss"]
    assert torch.equal(again, trained)


def test_export_over_an_export_leaves_one(tmp_path):
    exported(tmp_path, shard_bytes=100_000)
    exported(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["config.json", checkpoint.INDEX, *set(checkpoint.Shards(tmp_path).files.values())]
    )


def edited(folder, change) -> None:
    """Pack the whole export into one file without an index, ``change`` applied to its tensors."""
    shards, tensors = checkpoint.Shards(folder), {}
    for name, file in shards.files.items():
        with checkpoint.safe_open(folder / file, "pt") as f:
            tensors[name] = f.get_tensor(name)
    (folder / checkpoint.INDEX).unlink()
    change(tensors)
    checkpoint.write_tensors(folder / checkpoint.SINGLE, tensors)


P = checkpoint.LAYER_PREFIX.format(93)
EXPERT = P + "block_sparse_moe.experts.3.w2.weight"


def renamed(t, old, new):
    t[new] = t.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(P + "hnorm.weight"), r"93\.hnorm\.weight is missing"),
        (lambda t: t.pop(EXPERT + "_packed"), r"experts\.3\.w2\.weight is missing, and so is .*_packed"),
        (lambda t: t.pop(EXPERT + "_scale"), r"w2\.weight_scale is missing; .*_packed is there"),
        (lambda t: t.update({P + "enorm.bias": torch.ones(1)}), r"93\.enorm\.bias is no parameter of layout mtp"),
        (lambda t: t.update({P + "hnorm.weight": torch.ones(81)}), r"hnorm\.weight has shape \[81\]; wanted \[80\]"),
        (lambda t: t.update({P + "hnorm.weight": torch.ones(80, dtype=torch.int32)}), r"dtype torch\.int32; wanted"),
        (lambda t: t.update({EXPERT + "_scale": t[EXPERT + "_scale"].float()}), r"torch\.float32; wanted torch\.uint8"),
        (lambda t: t.update({EXPERT + "_packed": t[EXPERT + "_packed"][:, :8].clone()}), r"wanted \[64, 48\]"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(tmp_path, change, message):
    exported(tmp_path)
    edited(tmp_path, change)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load_k3(tmp_path)


def test_a_checkpoint_from_before_the_fine_tuning(tmp_path):
    """No W_E3 yet, embedding and head only in the target, residual-mixing weights on top, other layers beside it."""

    def change(t):
        t.pop(P + "fc.weight")
        renamed(t, P + "embed_tokens.weight", checkpoint.OF_TARGET["embed_tokens.weight"])
        renamed(t, P + "shared_head.head.weight", checkpoint.OF_TARGET["shared_head.head.weight"])
        t[P + "mlp_res_norm.weight"] = torch.ones(80)
        t["language_model.model.layers.9.anything"] = torch.ones(1)

    model = exported(tmp_path)
    edited(tmp_path, change)
    loaded = checkpoint.load_k3(tmp_path)
    assert torch.equal(loaded.fc.weight[:, -80:], torch.eye(80, dtype=torch.bfloat16))
    assert torch.count_nonzero(loaded.fc.weight) == 80
    assert torch.equal(loaded.shared_head.head.weight, model.shared_head.head.weight)


def test_only_the_files_that_are_needed_are_opened(tmp_path):
    exported(tmp_path)
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    index["weight_map"]["language_model.model.layers.5.mlp.weight"] = "not-there.safetensors"
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    checkpoint.load_k3(tmp_path)
    index["weight_map"][P + "hnorm.weight"] = "not-there.safetensors"
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(checkpoint.CheckpointError, match=r"not-there\.safetensors is missing"):
        checkpoint.load_k3(tmp_path)


def test_sizes_and_layer_come_from_the_config(tmp_path):
    exported(tmp_path, layer=7)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi", "text_config": data}))
    assert checkpoint.load_k3(tmp_path).config == DraftConfig.tiny()
    assert checkpoint.load_k3(tmp_path, num_steps=3).config.num_steps == 3
    with pytest.raises(checkpoint.CheckpointError, match=r"layers\.8\.fc|layers\.8\..* is missing"):
        checkpoint.load_k3(tmp_path, layer=8)
