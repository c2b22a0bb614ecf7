#!/usr/bin/env python3
"""Trainers of other libraries over this backend, with 2 ranks on the CPU: runs each, and prints a table.

    python tests/trainers.py            all
    python tests/trainers.py --only lightning

Each trains a small model over phalanx and over gloo. The losses and the parameters of both must be equal, bit for bit,
and those of all ranks. The exit status is 0 if they are. Needs accelerate, transformers, lightning, DeepSpeed with ninja,
and a C++ compiler.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
import warnings

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from conftest import environment, free_port, processes
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import phalanx_torch  # noqa: F401

WORLD = 2


class Numbers(Dataset):
    """Vectors, and the sums of their elements."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        vector = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return vector, vector.sum(0, keepdim=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))


def with_accelerate(rank, backend, folder):
    # accelerate knows no names of backends but its own, and takes the group that there is.
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == WORLD and accelerator.process_index == rank
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica, optimizer, data = accelerator.prepare(
        model, optimizer, DataLoader(Numbers(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1))
    )
    assert isinstance(replica, nn.parallel.DistributedDataParallel)
    losses = []
    for _ in range(2):
        for given, expected in data:
            with accelerator.accumulate(replica):
                loss = nn.functional.mse_loss(replica(given), expected)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses += accelerator.gather(loss.detach().reshape(1)).tolist()
    outputs = [
        accelerator.gather_for_metrics(replica(given)) for given, _ in accelerator.prepare(DataLoader(Numbers(), batch_size=5))
    ]
    assert sum(len(output) for output in outputs) == len(Numbers())
    assert broadcast_object_list([("from", rank)])[0] == ("from", 0)
    accelerator.save_state(f"{folder}/{backend}")
    # Rank 0 writes.
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{folder}/{backend}")
    accelerator.wait_for_everyone()
    return losses, accelerator.unwrap_model(replica)


def with_transformers(rank, backend, folder):
    class Words(Dataset):
        def __len__(self):
            return 45

        def __getitem__(self, index):
            words = torch.randint(1, 50, (6,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": words, "labels": words.sum() % 2}

    # As with accelerate, on which the Trainer builds.
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
        )
    )
    arguments = TrainingArguments(
        output_dir=f"{folder}/{backend}",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    assert arguments.world_size == WORLD and arguments.process_index == rank
    trainer = Trainer(model, arguments, train_dataset=Words(), eval_dataset=Words())
    trainer.train()
    predicted = trainer.predict(Words())
    assert len(predicted.predictions) == len(Words())
    losses = [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]
    assert len(losses) > 4
    return (losses if rank == 0 else None), trainer.accelerator.unwrap_model(trainer.model_wrapped)


def with_lightning(rank, backend, folder):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.losses = network(), []

        def training_step(self, batch, index):
            assert dist.get_backend() == backend
            loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
            self.losses.append(self.all_gather(loss.detach()).tolist())
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, index):
            self.log("validation", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

        def on_validation_epoch_end(self):
            self.losses.append(self.trainer.callback_metrics["validation"].item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    lightning.seed_everything(5, verbose=False)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        default_root_dir=f"{folder}/{backend}",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Numbers(), batch_size=5, shuffle=True), DataLoader(Numbers(), batch_size=5))
    assert trainer.world_size == WORLD and trainer.global_rank == rank
    assert trainer.callback_metrics["loss"] > 0 and len(module.losses) > 8
    return module.losses, module


def with_deepspeed(rank, backend, folder):
    os.environ["DS_ACCELERATOR"] = "cpu"
    # It compiles something of its own by ninja, which pip has put beside Python.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    # It looks for compilers and accelerators when it is imported.
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    model, losses = network(), []
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        # Each rank has a part of the optimizer's state, and gets its part of the gradients alone.
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # One that computes on every element by itself.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, _, data, _ = deepspeed.initialize(model=model, optimizer=optimizer, training_data=Numbers(), config=settings)
    assert deepspeed.comm.get_world_size() == WORLD and engine.global_rank == rank
    for _ in range(2):
        for given, expected in data:
            loss = nn.functional.mse_loss(engine(given), expected)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert engine.global_steps > 4
    engine.save_checkpoint(f"{folder}/{backend}")
    engine.load_checkpoint(f"{folder}/{backend}")
    every = [None] * WORLD
    dist.all_gather_object(every, losses)
    return every, engine.module


CASES = {
    "accelerate: Accelerator": with_accelerate,
    "transformers: Trainer": with_transformers,
    "lightning: DDPStrategy": with_lightning,
    "DeepSpeed: ZeRO stage 2": with_deepspeed,
}


def one(rank, name, backend, port, folder):
    warnings.simplefilter("ignore")
    environment(rank, WORLD, port)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD), OMP_NUM_THREADS="1")
    losses, model = CASES[name](rank, backend, folder)
    assert dist.get_backend() == backend
    parameters = {key: tensor.tolist() for key, tensor in model.state_dict().items()}
    dist.destroy_process_group()
    return losses, parameters


def compare(name, folder):
    """Trains over both backends; the difference raises an error."""
    ours, theirs = (processes(WORLD, one, name, backend, free_port(), folder) for backend in ("phalanx", "gloo"))
    assert ours[0][1] == ours[1][1], "the ranks' parameters differ"
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs], "the losses differ from gloo's"
    assert ours[0][1] == theirs[0][1], "the parameters differ from gloo's"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only.lower() in name.lower()]
    if not names:
        sys.exit(f"no case has {arguments.only!r} in its name: {', '.join(CASES)}")
    failed = False
    for name in names:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                compare(name, folder)
                outcome = "works"
            except AssertionError:
                failed, outcome = True, "FAILS"
                print(traceback.format_exc(), file=sys.stderr)
        print(f"| {name:40} | {outcome} | {time.monotonic() - begin:.1f} s |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
