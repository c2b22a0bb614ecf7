#!/usr/bin/env python3
"""Makes the vectors with which the tests compare this model: logits and gradients of Hugging Face's transformers.

    python3 -m venv target/reference && target/reference/bin/pip install torch==2.15.0 transformers==5.23.0
    target/reference/bin/python examples/roberta/reference/make.py [out/roberta/minilm]

Small models have random weights, which are kept here with their vectors. Those of MiniLM come from the folder that is given
(examples/roberta/fetch.py brings it); of its gradients a part is kept.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

HERE = Path(__file__).resolve().parent
SIZE = dict(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=20,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LENGTHS = [9, 4, 6]
SAMPLES = 16


def batch(pad, types):
    """Texts of unequal lengths, padded on the right."""
    shape = (len(LENGTHS), max(LENGTHS))
    tokens, kinds = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = torch.randint(5, SIZE["vocab_size"], (length,))
        kinds[row, length // 2 : length] = types - 1
    return {"input_ids": tokens, "token_type_ids": kinds, "attention_mask": (tokens != pad).long()}


def small(name, cls, config):
    torch.manual_seed(sum(name.encode()))
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
        for key, parameter in model.named_parameters():
            if "LayerNorm.weight" in key or "layer_norm.weight" in key:
                parameter += 1.0
    inputs = batch(config.pad_token_id, config.type_vocab_size)
    case = {key: inputs[key] for key in ("input_ids", "token_type_ids")}
    case["lengths"] = torch.tensor(LENGTHS)
    if "MaskedLM" in cls.__name__:
        places = torch.tensor([[0, 2], [0, 8], [1, 1], [2, 0], [2, 5]])
        targets = torch.tensor([7, 60, 5, 33, 7])
        logits = model(**inputs).logits[places[:, 0], places[:, 1]]
        case["places"] = places[:, 0] * max(LENGTHS) + places[:, 1]
    else:
        targets = torch.tensor([2, 0, 1])
        logits = model(**inputs).logits
    loss = torch.nn.functional.cross_entropy(logits, targets)
    loss.backward()
    case |= {"targets": targets, "logits": logits.detach(), "loss": loss.detach().reshape(1)}

    folder = HERE / "vectors" / name
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    gradients = {key: parameter.grad.contiguous() for key, parameter in model.named_parameters()}
    save_file(gradients, folder / "gradients.safetensors")
    save_file({key: value.contiguous() for key, value in case.items()}, folder / "case.safetensors")


def minilm(folder):
    """Of the real weights: hidden states, pooled vectors, and a part of each gradient."""
    texts = [
        "DistributedDataParallel averages gradients while they are still being computed.",
        "Naïve cafés: 3 hours become 1!",
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval()
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    output = model(**inputs)
    weights = torch.cos(torch.arange(output.pooler_output.numel(), dtype=torch.float32))
    (output.pooler_output * weights.reshape(output.pooler_output.shape)).sum().backward()
    case = {
        "input_ids": inputs["input_ids"],
        "lengths": inputs["attention_mask"].sum(1),
        "hidden": output.last_hidden_state.detach(),
        "pooled": output.pooler_output.detach(),
    }
    for key, parameter in model.named_parameters():
        gradient = parameter.grad.flatten()
        places = torch.arange(SAMPLES) * (len(gradient) // SAMPLES)
        case[f"gradient.{key}"] = torch.cat([gradient.norm().reshape(1), gradient[places]])
    target = HERE / "vectors" / "minilm"
    target.mkdir(parents=True, exist_ok=True)
    (target / "texts.json").write_text(json.dumps(texts, ensure_ascii=False) + "\n")
    save_file({key: value.contiguous() for key, value in case.items()}, target / "case.safetensors")


def main():
    roberta = RobertaConfig(**SIZE, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5, num_labels=3)
    bert = BertConfig(**SIZE, type_vocab_size=2, pad_token_id=0, num_labels=3)
    small("roberta-masked-lm", RobertaForMaskedLM, roberta)
    small("roberta-classifier", RobertaForSequenceClassification, roberta)
    small("bert-masked-lm", BertForMaskedLM, bert)
    small("bert-classifier", BertForSequenceClassification, bert)
    if len(sys.argv) > 1:
        minilm(sys.argv[1])


if __name__ == "__main__":
    main()
