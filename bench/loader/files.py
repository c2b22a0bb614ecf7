"""The files that both loaders read: made once from a seed, and kept.

`make(folder)` writes, where they are missing:

    jpeg/a, jpeg/b      2,000 pictures of 500 x 375, 375 x 500, 500 x 333 and 640 x 480 pixels, quality 94, half the colours (4:2:0)
    lines.txt           20,000 lines of 5 to 60 words
    tokenizer.json      a byte-level BPE of 8,000 tokens, trained on these lines
    lmdb/data.mdb       19,968 records of 12 KiB

A picture has what a photograph has and a decoder's speed depends on: a spectrum that falls with the frequency, edges, shaded areas and
the noise of a sensor. Pure noise would take several times as long to decode, and a plain area next to nothing.
"""

import random
import shutil
import struct
from pathlib import Path

PICTURES, LINES, RECORDS, RECORD = 2_000, 20_000, 19_968, 3 * 64 * 64
SIDES = [(500, 375), (375, 500), (500, 333), (640, 480)]


def picture(seed):
    import numpy as np
    from PIL import Image, ImageDraw

    chance = np.random.default_rng(seed)
    width, height = SIDES[seed % len(SIDES)]
    image = np.zeros((height, width, 3), np.float32)
    # Octaves of smooth noise: each twice as fine as the one before, and 0.68 times as strong.
    for octave in range(7):
        cells = 3 << octave
        grid = chance.normal(0, 45 * 0.68**octave, (cells, cells, 1)) + chance.normal(0, 14 * 0.6**octave, (cells, cells, 3))
        grid = np.clip(128 + grid, 0, 255).astype(np.uint8)
        image += np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC), np.float32) - 128
    canvas = Image.fromarray(np.clip(image + 118, 0, 255).astype(np.uint8))
    texture = 0.5 * (np.asarray(canvas, np.float32)[::-1] - 118)
    # Things with edges, lit from one side.
    for _ in range(int(chance.integers(4, 10))):
        mask = Image.new("L", canvas.size)
        x, y = chance.integers(-40, width), chance.integers(-40, height)
        box = [int(x), int(y), int(x + chance.integers(30, 240)), int(y + chance.integers(30, 240))]
        draw = ImageDraw.Draw(mask)
        (draw.ellipse if chance.random() < 0.6 else draw.rectangle)(box, fill=int(chance.integers(120, 256)))
        light = np.linspace(-40, 40, width, dtype=np.float32)[None, :, None] + chance.integers(30, 226, 3)
        thing = np.clip(light + texture, 0, 255).astype(np.uint8)
        canvas.paste(Image.fromarray(thing), (0, 0), mask)
    noisy = np.asarray(canvas, np.float32) + chance.normal(0, 4, (height, width, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def jpegs(folder):
    for n in range(PICTURES):
        path = folder / "ab"[n % 2] / f"{n:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        picture(n).save(path, quality=94)


def lines(path):
    """Words as often as Zipf's law says, made of syllables."""
    chance = random.Random(17)
    syllables = [c + v + e for c in "bcdfghjklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "st")]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    with path.open("w") as file:
        for _ in range(LINES):
            line = chance.choices(words, weights, k=chance.randint(5, 60))
            file.write(" ".join(line).capitalize() + chance.choice([".", "!", "?", ", 17."]) + "\n")


def tokenizer(path, text):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8_000, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False)
    made.train([str(text)], trainer)
    made.save(str(path))


def record(n):
    """As `image` in examples/throughput.rs."""
    return bytes((n * 31 + place * 7) % 256 for place in range(RECORD))


def records(folder):
    import lmdb

    folder.mkdir()
    kinds = [record(n) for n in range(256)]
    with lmdb.open(str(folder), map_size=1 << 30) as env, env.begin(write=True) as transaction:
        for n in range(RECORDS):
            # The keys of our LmdbWriter: numbers of 64 bits, the largest byte first.
            transaction.put(struct.pack(">Q", n), kinds[n % 256], append=True)


def make(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def once(name, write):
        part = folder / f"{name}.part"
        if (folder / name).exists():
            return
        print(f"makes {folder / name}", flush=True)
        if part.is_dir():
            shutil.rmtree(part)
        write(part)
        part.rename(folder / name)

    def into(write):
        def made(part):
            part.mkdir()
            write(part)

        return made

    once("jpeg", into(jpegs))
    once("lines.txt", lines)
    once("tokenizer.json", lambda part: tokenizer(part, folder / "lines.txt"))
    once("lmdb", records)
