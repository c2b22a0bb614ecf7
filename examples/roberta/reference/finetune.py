#!/usr/bin/env python3
"""The training of `roberta fine-tune` in PyTorch: the same texts, weights, order, batches and schedule.

    target/reference/bin/python examples/roberta/reference/finetune.py --seed 1 --epochs 2
    target/reference/bin/torchrun --nproc-per-node 2 examples/roberta/reference/finetune.py --seed 1 --epochs 2

What differs is what random numbers decide: the new head's weights, and dropout. In one process, steps take the batches of --ranks
ranks together, in the order of torch's DistributedSampler, which is that of phalanx's. torchrun's ranks train with
DistributedDataParallel, over gloo on CPUs and NCCL on GPUs; --ranks is then their number. Each looks at all held-out texts.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", type=Path, default=Path("out/roberta/minilm"))
parser.add_argument("--data", type=Path, default=Path("out/roberta/mails"))
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--warmup", type=float, default=0.1)
parser.add_argument("--weight-decay", type=float, default=0.01)
parser.add_argument("--max-norm", type=float, default=1.0)
parser.add_argument("--max-tokens", type=int, default=128)
parser.add_argument("--train-limit", type=int)
parser.add_argument("--held-out-limit", type=int)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
options = parser.parse_args()


rank = None
if "RANK" in os.environ:
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, options.ranks = dist.get_rank(), dist.get_world_size()


def read(name, limit):
    lines = (options.data / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][:limit]


train, held_out = read("train.jsonl", options.train_limit), read("held-out.jsonl", options.held_out_limit)
torch.manual_seed(options.seed)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2).to(options.device)
trained = model
if rank is not None:
    trained = DistributedDataParallel(model)
    torch.manual_seed(options.seed + rank)  # Ranks drop other values.


def batch(examples):
    texts = [example["text"] for example in examples]
    inputs = tokenizer(texts, truncation=True, max_length=options.max_tokens, padding=True, return_tensors="pt")
    labels = torch.tensor([example["label"] for example in examples])
    return inputs.to(options.device), labels.to(options.device)


def steps(epoch):
    """For each step, the examples of this rank, or of all that it stands for."""
    shares = []
    for of in range(options.ranks) if rank is None else [rank]:
        sampler = DistributedSampler(train, num_replicas=options.ranks, rank=of, seed=options.seed)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    for start in range(0, len(shares[0]), options.batch_size):
        yield [train[index] for share in shares for index in share[start : start + options.batch_size]]


def plain(name):
    return name.endswith("bias") or "LayerNorm" in name


named = list(model.named_parameters())
groups = [
    {"params": [p for name, p in named if not plain(name)], "weight_decay": options.weight_decay},
    {"params": [p for name, p in named if plain(name)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=options.lr, eps=1e-8, fused=True)
each = -(-len(train) // options.ranks)
total = -(-each // options.batch_size) * options.epochs
warmup = -int(-(options.warmup * total) // 1)
scheduler = get_linear_schedule_with_warmup(optimizer, warmup, total)

for epoch in range(options.epochs):
    model.train()
    if rank is not None:
        dist.barrier()
    begun, sums = time.monotonic(), [0.0, 0]
    for examples in steps(epoch):
        inputs, labels = batch(examples)
        loss = torch.nn.functional.cross_entropy(trained(**inputs).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sums = [sums[0] + loss.item() * len(labels), sums[1] + len(labels)]
    if rank is not None:
        of_all = torch.tensor(sums, device=options.device)
        dist.all_reduce(of_all)
        sums = of_all.tolist()
    seconds = time.monotonic() - begun
    model.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for start in range(0, len(held_out), options.batch_size):
            inputs, labels = batch(held_out[start : start + options.batch_size])
            logits = model(**inputs).logits
            right += (logits.argmax(1) == labels).sum().item()
            loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    if rank not in (None, 0):
        continue
    print(
        f"epoch {epoch + 1}: loss {sums[0] / sums[1]:.4f}, held out: loss {loss / len(held_out):.4f}, "
        f"accuracy {100 * right / len(held_out):.2f} %, {seconds:.2f} s",
        flush=True,
    )
if rank is not None:
    dist.destroy_process_group()
