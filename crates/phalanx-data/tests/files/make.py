#!/usr/bin/env python3
"""Makes the files in this folder with the programs that users have, and what these programs read in them, as values.json.

    python3 make.py FOLDER            writes files and values into FOLDER
    python3 make.py --check FOLDER    reads the files in FOLDER again and compares with its values.json

It needs numpy, pandas, pillow, opencv-python-headless, lmdb, safetensors and tifffile. tests/it/files.rs reads the files with our own
readers and compares with values.json. Bytes of files differ from version to version of these programs; values do not, but for lossy
pictures.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

import cv2
import lmdb
import numpy as np
import pandas as pd
import safetensors
import tifffile
from PIL import Image, ImageOps, UnidentifiedImageError
from safetensors.numpy import save_file

WIDTH, HEIGHT = 20, 13


def picture():
    """Smooth, so that lossy formats keep it, and different in all directions."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([x * 12, y * 18, 255 - (x + y) * 7], axis=2).astype(np.uint8)


def noise():
    """In which each pixel that is weighed wrongly shows."""
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (30, 41, 3), dtype=np.uint8))


# What is cut out of the noise (left, top, right, bottom), and to which width and height it is scaled.
SCALED = [
    ((0, 0, 41, 30), (14, 11)),
    ((0, 0, 41, 30), (60, 70)),
    ((0, 0, 41, 30), (41, 9)),
    ((5, 3, 32, 29), (8, 8)),
    ((5, 3, 32, 29), (40, 40)),
]


def fresh():
    """Of its own: what Pillow notes at a picture for a JPEG stands in the way of a TIFF."""
    return Image.fromarray(picture())


def images(folder):
    folder.mkdir()
    rgb = Image.fromarray(picture())
    gray = rgb.convert("L")
    rgba = rgb.copy()
    rgba.putalpha(gray)
    palette = rgb.quantize(16)
    turned = Image.Exif()
    turned[0x0112] = 6
    other = ImageOps.mirror(rgb)
    deep = (picture().astype(np.uint16) * 257 + np.arange(WIDTH, dtype=np.uint16)[None, :, None] * 11) % 65521
    bgr = picture()[:, :, ::-1]

    rgb.save(folder / "444.jpg", quality=95, subsampling=0)
    rgb.save(folder / "420.jpg", quality=95, subsampling=2)
    rgb.save(folder / "progressive.jpg", quality=95, progressive=True)
    rgb.save(folder / "restarts.jpg", quality=95, restart_marker_blocks=1)
    rgb.save(folder / "turned.jpg", quality=95, exif=turned)
    gray.save(folder / "gray.jpg", quality=95)
    rgb.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    rgb.save(folder / "two.jpg", format="MPO", quality=95, save_all=True, append_images=[other])
    cv2.imwrite(str(folder / "opencv.jpg"), bgr)

    rgb.save(folder / "rgb.png")
    noise().save(folder / "noise.png")
    rgba.save(folder / "rgba.png")
    gray.save(folder / "gray.png")
    rgba.convert("LA").save(folder / "la.png")
    gray.convert("1").save(folder / "1.png")
    palette.save(folder / "palette.png")
    palette.save(folder / "transparent.png", transparency=3)
    rgb.save(folder / "turned.png", exif=turned)
    cv2.imwrite(str(folder / "16.png"), deep[:, :, ::-1])
    cv2.imwrite(str(folder / "gray16.png"), deep[:, :, 0])
    rgb.save(folder / "animated.png", save_all=True, append_images=[other])
    gray.save(folder / "gif.png", format="GIF")

    rgb.save(folder / "rgb.bmp")
    gray.save(folder / "gray.bmp")
    gray.convert("1").save(folder / "1.bmp")
    palette.save(folder / "palette.bmp")
    rgba.save(folder / "rgba.bmp")
    cv2.imwrite(str(folder / "opencv.bmp"), bgr)

    rgb.save(folder / "rgb.ppm")
    gray.save(folder / "gray.pgm")
    gray.convert("1").save(folder / "1.ppm")
    cv2.imwrite(str(folder / "text.ppm"), bgr, [cv2.IMWRITE_PXM_BINARY, 0])
    cv2.imwrite(str(folder / "gray16.pgm"), deep[:, :, 0])
    (folder / "joined.ppm").write_bytes((folder / "rgb.ppm").read_bytes() * 2)

    for compression in [None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"]:
        quality = {"quality": 95} if compression == "jpeg" else {}
        fresh().save(folder / f"{compression or 'raw'}.tif", compression=compression, **quality)
    gray.save(folder / "gray.tif")
    gray.convert("1").save(folder / "1.tif")
    palette.save(folder / "palette.tif")
    rgba.save(folder / "rgba.tif")
    rgb.convert("CMYK").save(folder / "cmyk.tif")
    fresh().save(folder / "turned.tif", tiffinfo={0x0112: 6})
    fresh().save(folder / "pages.tif", save_all=True, append_images=[ImageOps.mirror(fresh())])
    fresh().save(folder / "big.tif", big_tiff=True)
    tifffile.imwrite(folder / "16.tif", deep, photometric="rgb")
    tifffile.imwrite(folder / "gray16.tif", deep[:, :, 0])
    tifffile.imwrite(folder / "float.tif", picture().astype(np.float32) / 255, photometric="rgb")
    tifffile.imwrite(folder / "tiles.tif", picture(), photometric="rgb", tile=(16, 16))
    tifffile.imwrite(folder / "planes.tif", picture().transpose(2, 0, 1), photometric="rgb", planarconfig="separate")
    tifffile.imwrite(folder / "negative.tif", picture()[:, :, 0], photometric="miniswhite")
    tifffile.imwrite(folder / "motorola.tif", picture(), photometric="rgb", byteorder=">")

    rgb.save(folder / "lossless.webp", lossless=True)
    rgb.save(folder / "lossy.webp", quality=95)
    rgba.save(folder / "rgba.webp", lossless=True)
    rgb.save(folder / "turned.webp", lossless=True, exif=turned)
    rgb.save(folder / "animated.webp", save_all=True, append_images=[other], lossless=True)


def image_values(folder):
    """As torchvision's loader reads them; those of 16 bits as NumPy rounds what OpenCV reads."""
    values = {}
    for path in sorted(folder.iterdir()):
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
                upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except UnidentifiedImageError:
            continue
        if "16" in path.stem:
            deep = cv2.imread(str(path), cv2.IMREAD_UNCHANGED).astype(np.uint32)
            assert deep.max() > 255
            deep = deep[:, :, ::-1] if deep.ndim == 3 else np.repeat(deep[:, :, None], 3, axis=2)
            pixels = upright = ((deep + 128) // 257).astype(np.uint8)
        values[path.name] = {"height": pixels.shape[0], "width": pixels.shape[1], "rgb": pixels.tobytes().hex()}
        if upright.shape != pixels.shape:
            values[path.name]["upright"] = upright.tobytes().hex()
        if path.name == "noise.png":
            part = lambda box: Image.fromarray(pixels).crop(box)
            values[path.name]["scaled"] = [
                {"box": box, "size": size, "rgb": part(box).resize(size, Image.Resampling.BILINEAR).tobytes().hex()}
                for box, size in SCALED
            ]
    return values


def bits(value):
    return format(struct.unpack("<Q", struct.pack("<d", value))[0], "016x")


def floats():
    """Doubles whose texts are hard to read, and ordinary ones."""
    hard = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2.2250738585072014e-308, 9007199254740993.0, 1e23, -0.0, 8.41e21]
    return hard + list(np.random.default_rng(7).normal(size=16) * 10.0 ** np.random.default_rng(8).integers(-20, 20, 16))


def records():
    texts = ['plain', 'a,b', 'in "quotes"', 'two\nlines', '', 'Grüße', ' blank ', '\u65e5\u672c', "tab\tbed", "'"]
    return [
        {
            "text": texts[n % len(texts)],
            "value": float(value),
            "small": float(np.float32(value)) if abs(value) < 1e38 else 1.5,
            "big": (1 << 53) + 2 * n + 1,
            "label": n,
        }
        for n, value in enumerate(floats())
    ]


def tables(folder):
    folder.mkdir()
    frame = pd.DataFrame(records())
    frame.to_csv(folder / "pandas.csv", index=False)
    frame.to_csv(folder / "windows.csv", index=False, lineterminator="\r\n", encoding="utf-8-sig")
    frame.to_csv(folder / "tabs.tsv", index=False, sep="\t")
    frame.to_csv(folder / "headless.csv", index=False, header=False)
    short = frame[frame.text.isin(["plain", "Grüße", "'"])]
    short.to_csv(folder / "returns.csv", index=False, lineterminator="\r")
    short.to_csv(folder / "blanks.csv", index=False, lineterminator="\n\n\n")
    short.to_csv(folder / "utf-16.csv", index=False, encoding="utf-16")
    short.to_csv(folder / "latin-1.csv", index=False, encoding="latin-1")
    lines = [json.dumps(record) for record in records()]
    (folder / "python.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [json.dumps(record, ensure_ascii=False) for record in records()]
    (folder / "mark.jsonl").write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    (folder / "utf-16.jsonl").write_text("\n".join(lines), encoding="utf-16")
    frame.drop(columns="value").to_json(folder / "pandas.jsonl", orient="records", lines=True, double_precision=15)


def table_values(folder):
    values = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".jsonl":
            text = path.read_bytes().decode("utf-16" if "utf-16" in path.name else "utf-8-sig")
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            encoding = path.stem if path.stem in ["utf-16", "latin-1"] else "utf-8"
            names = list(records()[0]) if path.stem == "headless" else None
            frame = pd.read_csv(
                path,
                sep="\t" if path.suffix == ".tsv" else ",",
                encoding=encoding,
                names=names,
                keep_default_na=False,
            )
            rows = frame.to_dict("records")
        values[path.name] = [
            {
                "text": row["text"],
                "value": bits(row["value"]) if "value" in row else None,
                "small": bits(row["small"]),
                "big": str(row["big"]),
                "label": row["label"],
            }
            for row in rows
        ]
    return values


TYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"]


def array(kind):
    numbers = np.random.default_rng(9).integers(0, 256, size=(4, 3, 2, np.dtype(kind).itemsize), dtype=np.uint8)
    if kind == "b1":
        return (numbers[..., 0] % 2).astype(bool)
    if kind[0] == "f":
        return np.random.default_rng(9).normal(size=(4, 3, 2)).astype(kind)
    return numbers.view(kind)[..., 0].copy()


def arrays(folder):
    folder.mkdir()
    for kind in TYPES:
        np.save(folder / f"{kind}.npy", array(kind))
        np.save(folder / f"{kind}-fortran.npy", np.asfortranarray(array(kind)))
    np.save(folder / "vector.npy", array("i4").ravel())
    np.save(folder / "fortran-matrix.npy", np.asfortranarray(array("f4").reshape(4, 6)))
    np.save(folder / "none.npy", array("f4")[:0])
    np.save(folder / "sliced.npy", array("f4")[::2, 1:])
    for version in [2, 3]:
        with open(folder / f"version-{version}.npy", "wb") as file:
            np.lib.format.write_array(file, array("f4"), version=(version, 0))
    # As Python 2 on 64-bit machines wrote integers.
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (4L, 3L, 2L), }"
    header += b" " * (117 - len(header)) + b"\n"
    (folder / "python-2.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + array("i8").tobytes())
    # What we refuse.
    np.save(folder / "no-big-endian.npy", array("f4").astype(">f4"))
    np.save(folder / "no-scalar.npy", np.float32(1))
    np.save(folder / "no-complex.npy", array("f4").astype(np.complex64))
    np.save(folder / "no-text.npy", np.array(["a", "bc"]))
    np.save(folder / "no-objects.npy", np.array([{}, None]), allow_pickle=True)
    np.save(folder / "no-fields.npy", np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]))
    with open(folder / "no-two.npy", "wb") as file:
        np.save(file, array("f4"))
        np.save(file, array("f4"))
    np.savez(folder / "zip.npz", x=array("f4"))
    (folder / "zip.npz").rename(folder / "no-zip.npy")


def array_values(folder):
    values = {}
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("no-"):
            loaded = np.load(path)
            values[path.name] = {"type": loaded.dtype.str[1:], "shape": loaded.shape, "bytes": loaded.tobytes(order="C").hex()}
    return values


def tensors(folder):
    folder.mkdir()
    whole = {kind: array(kind) for kind in TYPES}
    brain = array("u2")[:, :, 0].copy()
    spec = safetensors.TensorSpec(dtype="bfloat16", shape=list(brain.shape), data_ptr=brain.ctypes.data, data_len=brain.nbytes)
    save_file(whole, folder / "numpy.safetensors", metadata={"format": "np"})
    (folder / "bfloat16.safetensors").write_bytes(safetensors.serialize({"x": spec}))
    save_file({"x": array("f4").astype(np.complex64)}, folder / "no-complex.safetensors")
    save_file({}, folder / "no-tensors.safetensors")


def tensor_values(folder):
    values = {}
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("no-"):
            read = safetensors.deserialize(path.read_bytes())
            values[path.name] = {
                name: {"type": tensor["dtype"], "shape": tensor["shape"], "bytes": bytes(tensor["data"]).hex()}
                for name, tensor in read
            }
    return values


def items(count):
    return {f"key-{n:04}".encode(): bytes([n]) * (n * 37 % 100) for n in range(count)}


def databases(folder):
    folder.mkdir()
    with lmdb.open(str(folder / "plain.lmdb"), subdir=False, lock=False, map_size=1 << 20) as env, env.begin(write=True) as txn:
        for key, value in items(12).items():
            txn.put(key, value)
    with lmdb.open(str(folder / "named.lmdb"), subdir=False, lock=False, map_size=1 << 20, max_dbs=4) as env:
        train, valid = env.open_db(b"train"), env.open_db(b"valid")
        twice, numbers = env.open_db(b"twice", dupsort=True), env.open_db(b"numbers", integerkey=True)
        with env.begin(write=True) as txn:
            for key, value in items(12).items():
                txn.put(key, value, db=train)
            for key, value in items(7).items():
                txn.put(key, value[::-1] + b"valid", db=valid)
            txn.put(b"a", b"1", db=twice)
            txn.put(b"a", b"2", db=twice)
            txn.put(struct.pack("@Q", 7), b"seven", db=numbers)
            txn.put(b"about", b"x" * 48)
        # As `mdb_copy -c` does.
        with open(folder / "compact.lmdb", "wb") as file:
            env.copyfd(file.fileno(), compact=True)


def database_values(folder):
    values = {}
    for path in sorted(folder.glob("*.lmdb")):
        env = lmdb.open(str(path), subdir=False, lock=False, readonly=True, max_dbs=4)
        for name in [None] if path.stem == "plain" else [b"train", b"valid"]:
            with env.begin(db=env.open_db(name, create=False)) as txn:
                values[f"{path.name}:{name.decode() if name else ''}"] = [
                    [key.decode(), value.hex()] for key, value in txn.cursor()
                ]
    return values


KINDS = {
    "images": (images, image_values),
    "tables": (tables, table_values),
    "arrays": (arrays, array_values),
    "tensors": (tensors, tensor_values),
    "databases": (databases, database_values),
}


def values(folder):
    return json.loads(json.dumps({kind: read(folder / kind) for kind, (_, read) in KINDS.items()}))


def main():
    check, folder = sys.argv[1] == "--check", Path(sys.argv[-1])
    if check:
        found, expected = values(folder), json.loads((folder / "values.json").read_text())
        for kind in KINDS:
            assert found[kind].keys() == expected[kind].keys(), kind
            for name, value in found[kind].items():
                lossy = name.endswith((".jpg", "jpeg.tif", "lossy.webp"))
                assert lossy or value == expected[kind][name], f"{kind}/{name} has other values"
        return
    for kind, (make, _) in KINDS.items():
        shutil.rmtree(folder / kind, ignore_errors=True)
        make(folder / kind)
    text = json.dumps(values(folder), indent=0, sort_keys=True, ensure_ascii=True)
    (folder / "values.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
