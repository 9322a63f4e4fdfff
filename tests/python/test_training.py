"""Training as users run it: Trainer with a packing collator, wrappers, and no S x S tensor anywhere."""

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

import packed_sdpa
from hf_models import ARCHITECTURES, LENGTHS, VOCAB, difference, each_alone, gradients, packed_batch, worst
from packed_sdpa import _torch_private

EXACT = 1e-12


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operator returned, by elements of its storage."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.by = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                elements = max(leaf.numel(), leaf.untyped_storage().nbytes() // max(1, leaf.element_size()))
                if elements > self.elements:
                    self.elements, self.by = elements, str(func)
        return result


SIZE = 8192


def long_batch():
    lengths = (1500, 700, 3000, 92, 2900)
    return packed_batch(lengths)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("llama", False),
        ("mistral", True),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
    ],
)
def test_no_tensor_of_s_times_s_elements(name, checkpointing):
    """A step at S 8192; also with a 2-D mask, for which Transformers builds its dense mask even unpacked."""
    changes = {"max_position_embeddings": SIZE, "n_positions": SIZE, "num_hidden_layers": 1, "n_layer": 1}
    if name == "gemma3":
        changes.update(num_hidden_layers=2)
    model = ARCHITECTURES[name].make(dtype=torch.float32, **changes).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = long_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -100:] = 0
    with packed_sdpa.attach(model, strict=True) as handle, LargestTensor() as largest:
        model(**batch, attention_mask=mask, labels=batch["input_ids"]).loss.backward()
        assert packed_sdpa.report(handle).taken > 0
    assert largest.elements < SIZE * SIZE / 16, largest.by
    assert largest.elements >= SIZE * VOCAB  # it did see the logits


MEMORY = """
import resource, sys, torch
sys.path.insert(0, {tests!r})
import packed_sdpa
from hf_models import ARCHITECTURES, packed_batch
torch.set_num_threads(1)
model = ARCHITECTURES["llama"].make(dtype=torch.float32, max_position_embeddings=16384, num_hidden_layers=1)
batch = packed_batch((3000, 1400, 6000, 184, 5800))
with packed_sdpa.attach(model, strict=True):
    short = batch["input_ids"][:, :3000]
    model(input_ids=short, doc_ids=torch.ones(1, 3000).long(), labels=short).loss.backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(**batch, labels=batch["input_ids"]).loss.backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_peak_memory_of_a_step():
    """S 16384: a byte for each pair would be 256 MB. Kernels' own memory counts here too."""
    script = MEMORY.format(tests=os.path.dirname(__file__))
    grown = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert grown < 150


class Documents(torch.utils.data.Dataset):
    def __init__(self, count=12):
        generator = torch.Generator().manual_seed(3)
        sizes = torch.randint(3, 12, (count,), generator=generator).tolist()
        self.items = [torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in sizes]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return {"input_ids": self.items[index], "labels": self.items[index]}


def train(model, folder, collator, attached, checkpointing=False):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses = []

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                losses.append(logs["loss"])

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=5,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        max_grad_norm=0.0,
    )
    if attached:
        packed_sdpa.attach(model)
    trainer = Trainer(model, arguments, train_dataset=Documents(), data_collator=collator, callbacks=[Losses()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer.train()
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_trainer_with_flattening_collator_equals_unpacked_training(tmp_path):
    """The one line: packed_sdpa.attach(model). The same data, padded and not attached, trains to the same weights."""
    from transformers import DataCollatorWithFlattening

    def padding(items):
        size = max(len(item["input_ids"]) for item in items)
        rows = {"input_ids": 0, "labels": -100}
        batch = {
            name: torch.tensor([item[name] + [fill] * (size - len(item[name])) for item in items])
            for name, fill in rows.items()
        }
        batch["attention_mask"] = torch.tensor(
            [[1] * len(i["input_ids"]) + [0] * (size - len(i["input_ids"])) for i in items]
        )
        return batch

    start = ARCHITECTURES["llama"].make()
    expected_losses, expected = train(copy.deepcopy(start), tmp_path, padding, attached=False)
    collators = [
        DataCollatorWithFlattening(),
        DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    ]
    for collator in collators:
        for checkpointing in (False, True):
            model = copy.deepcopy(start)
            losses, weights = train(model, tmp_path, collator, attached=True, checkpointing=checkpointing)
            assert len(losses) == 3 and losses == pytest.approx(expected_losses, abs=1e-4)
            assert worst(weights, expected) < 1e-6
            report = packed_sdpa.report(model)
            assert report.passed == 0 and report.taken == 2 * 6 * (2 if checkpointing else 1)


# ---- wrappers


class LoraLinear(nn.Module):
    """A low-rank adapter by hand, as PEFT wraps a projection."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False).double()
        self.b = nn.Linear(2, base.out_features, bias=False).double()

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class PeftLike(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def test_adapters_and_their_wrapper():
    model = ARCHITECTURES["llama"].make()
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
    batch = packed_batch()
    expected = each_alone(model, batch)
    wrapped = PeftLike(model)
    with packed_sdpa.attach(wrapped, strict=True) as handle:
        assert difference(wrapped(**batch).logits, expected) < EXACT
        ids = torch.repeat_interleave(torch.arange(1, 6), torch.tensor(LENGTHS))[None]
        assert difference(wrapped(batch["input_ids"], doc_ids=ids).logits[:, :5], expected[:, :5]) < EXACT
        assert packed_sdpa.report(handle).layouts_built == 2


@pytest.fixture(scope="module")
def one_process_group(tmp_path_factory):
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("attach_inner", [False, True])
def test_ddp(one_process_group, attach_inner):
    model = ARCHITECTURES["llama"].make()
    batch = packed_batch()
    expected = gradients(model, each_alone(model, batch))
    ddp = nn.parallel.DistributedDataParallel(model)
    with packed_sdpa.attach(model if attach_inner else ddp, strict=True):
        logits = ddp(batch["input_ids"], None, batch["position_ids"]).logits  # by place, through *inputs
        got = gradients(ddp, logits)
    assert worst({name.removeprefix("module."): grad for name, grad in got.items()}, expected) < 1e-10


@pytest.mark.parametrize("shard_first", [False, True])
def test_fsdp2(one_process_group, shard_first):
    from torch.distributed.fsdp import fully_shard

    model = ARCHITECTURES["llama"].make(dtype=torch.float32)
    batch = packed_batch()
    expected = each_alone(model, batch)

    def shard():
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)

    if shard_first:
        shard()
    handle = packed_sdpa.attach(model, strict=True)
    if not shard_first:
        shard()
    logits = model(**batch).logits
    assert difference(logits, expected) < 1e-5
    logits.sum().backward()
    handle.detach()
    leaked = model(**batch, use_cache=True).logits
    assert difference(leaked, expected) > 1e-3  # stock again


# ---- compile


@pytest.mark.slow
@pytest.mark.skipif(not _torch_private.TRACES_STR_SUBCLASSES, reason="this torch cannot, and says so (test_compile.py)")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_case_44_compiled_layers_take_new_documents_without_recompiling(backend):
    """Case 44: 20 batches with other splits; at most 2 compilations of a layer, no graph break."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = ARCHITECTURES["llama"].make(dtype=torch.float32, num_hidden_layers=1)
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    stock = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with packed_sdpa.attach(model) as handle:
        model.model.layers[0].compile(fullgraph=True, backend=counter)
        for round_ in range(20):
            cuts = torch.randperm(29, generator=generator)[: 1 + round_ % 5].add(1).sort().values.tolist()
            lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 30], strict=True))
            batch = packed_batch(lengths, seed=round_)
            got = gradients(model, model(**batch, use_cache=False).logits)
            assert worst(got, gradients(stock, each_alone(stock, batch, lengths))) < 1e-4
        assert handle.attached
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_hooked_layers_break_the_graph_and_stay_right():
    """The hooks route under compile: attention runs between two graphs, with the documents of this forward."""
    model = ARCHITECTURES["llama"].make(dtype=torch.float32, num_hidden_layers=1)
    torch._dynamo.reset()
    stock = copy.deepcopy(model)
    with packed_sdpa.attach(model, route="hooks", strict=True):
        model.model.layers[0].compile(backend="aot_eager")
        for seed, lengths in enumerate(((5, 20), (10, 10, 5), LENGTHS)):
            batch = packed_batch(lengths, seed=seed)
            got = gradients(model, model(**batch, use_cache=False).logits)
            assert worst(got, gradients(stock, each_alone(stock, batch, lengths))) < 1e-4
    with packed_sdpa.attach(stock, route="hooks"), pytest.raises(torch._dynamo.exc.Unsupported):
        stock.model.layers[0].compile(fullgraph=True, backend="eager")  # asked for one graph: loud
        stock(**packed_batch(), use_cache=False)


@pytest.mark.slow
def test_whole_model_compiled_is_packed_or_loud():
    model = ARCHITECTURES["llama"].make(dtype=torch.float32, num_hidden_layers=1).eval()
    batch = packed_batch()
    expected = each_alone(model, batch)
    torch._dynamo.reset()
    with packed_sdpa.attach(model):
        compiled = torch.compile(model, backend="eager")
        for seed, lengths in enumerate((LENGTHS, (5, 20))):
            batch = packed_batch(lengths, seed=seed)
            with packed_sdpa_disabled(model):
                expected = each_alone(model, batch, lengths)
            assert difference(compiled(**batch).logits, expected) < 1e-5


class packed_sdpa_disabled:  # noqa: N801
    def __init__(self, model):
        self.handle = packed_sdpa.attach(model)

    def __enter__(self):
        self.handle.enabled = False

    def __exit__(self, *_):
        self.handle.enabled = True
        self.handle.detach()


def test_autocast():
    """Case 26 through a model."""
    model = ARCHITECTURES["llama"].make(dtype=torch.float32)
    batch = packed_batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = each_alone(model, batch)
        with packed_sdpa.attach(model, strict=True):
            logits = model(**batch).logits
    assert logits.dtype == expected.dtype and difference(logits.float(), expected.float()) < 5e-2


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_adapters_on_a_frozen_model_with_checkpointing(route, use_reentrant):
    """As PEFT trains: only the adapters have gradients, and the embeddings' output is made to require one."""
    model = ARCHITECTURES["llama"].make().train().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj)
    model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    batches = [packed_batch(seed=seed) for seed in range(2)]

    def backward(*outputs):
        for parameter in trained:
            parameter.grad = None
        for logits in outputs:
            logits.square().sum().backward()
        return [parameter.grad for parameter in trained]

    expected = backward(*(each_alone(model, batch) for batch in batches))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with packed_sdpa.attach(PeftLike(model), route=route, strict=True):
        outputs = [model(**batch).logits for batch in batches]
        got = backward(*outputs)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-10 * max(1.0, float(theirs.abs().max()))


class PromptLike(PeftLike):
    """Puts learned rows before those that it was given, as prompt tuning does."""

    def __init__(self, model, rows=3):
        super().__init__(model)
        self.prompt = nn.Parameter(torch.randn(1, rows, model.config.hidden_size).double())

    def forward(self, input_ids, position_ids=None, **kwargs):
        rows = torch.cat([self.prompt, self.base_model.get_input_embeddings()(input_ids)], 1)
        return self.base_model(inputs_embeds=rows, **kwargs)


@pytest.mark.parametrize("route", ["interface", "hooks"])
def test_rows_that_a_wrapper_adds_are_not_packed_in_silence(route):
    wrapped = PromptLike(ARCHITECTURES["llama"].make())
    batch = packed_batch()
    stock = wrapped(**batch).logits
    named = r"layers\.0\.self_attn \(LlamaAttention\) ran in a packed forward without packed attention: .*(S 25|length)"
    with packed_sdpa.attach(wrapped, route=route), pytest.warns(UserWarning, match=named):
        assert torch.equal(wrapped(**batch).logits, stock)
    with packed_sdpa.attach(wrapped, route=route, strict=True), pytest.raises(packed_sdpa.NotTakenError, match=named):
        wrapped(**batch)
