"""What TensorBoard finds in the record that tensorboard.sh has made: steps 0 to 149, and 120 to 199 again."""

import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2

runs = sys.argv[1]
run = event_accumulator.EventAccumulator(
    f"{runs}/line", size_guidance={kind: 0 for kind in ("scalars", "histograms", "images", "tensors")}
)
run.Reload()
tags = run.Tags()

assert {"loss", "weights/slope", "system/memory_bytes/rank0", "system/memory_bytes/rank1"} <= set(tags["scalars"]), tags
steps = [event.step for event in run.Scalars("loss")]
assert steps == list(range(200)), f"each step once: {steps}"
losses = [event.value for event in run.Scalars("loss")]
assert losses[0] > 1 and losses[119] < losses[0], losses

assert tags["histograms"] == ["errors"] and tags["images"] == ["line"], tags
assert [event.step for event in run.Histograms("errors")] == [0, 50, 100, 150], run.Histograms("errors")
histogram = run.Histograms("errors")[0].histogram_value
assert histogram.num == 64 and sum(histogram.bucket) == 64 and len(histogram.bucket_limit) == 64, histogram
assert histogram.min <= histogram.bucket_limit[0] and histogram.bucket_limit[-1] == histogram.max, histogram
picture = run.Images("line")[0]
assert (picture.width, picture.height) == (64, 64) and picture.encoded_image_string[1:4] == b"PNG", picture

note = run.Tensors("note")[0].tensor_proto.string_val[0]
assert note.startswith(b"y = **"), note
metadata = run.SummaryMetadata("_hparams_/session_start_info")
assert metadata.plugin_data.plugin_name == "hparams", metadata
start = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info
assert start.hparams["learning_rate"].number_value == 0.05 and start.hparams["optimizer"].string_value == "sgd", start
metadata = run.SummaryMetadata("_hparams_/session_end_info")
end = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_end_info
assert end.status == 1, f"success: {end}"
print("TensorBoard's reader: every step once, and every kind of record")

# What the page in the browser asks for.
with tempfile.TemporaryFile() as said:
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", runs, "--port", "0", "--host", "127.0.0.1"],
        stdout=said, stderr=subprocess.STDOUT,
    )
    try:
        address = None
        for _ in range(600):
            time.sleep(0.1)
            said.seek(0)
            words = said.read().decode().split()
            address = next((word for word in words if word.startswith("http://")), None)
            if address or server.poll() is not None:
                break
        assert address, f"TensorBoard has not started: {' '.join(words)}"

        def ask(path, **query):
            url = f"{address.rstrip('/')}/data/plugin/{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)

        for _ in range(100):
            found = ask("scalars/tags")
            if "loss" in found.get("line", {}):
                break
            time.sleep(0.1)
        assert "loss" in found["line"], found
        for _ in range(100):
            points = ask("scalars/scalars", run="line", tag="loss")
            if len(points) == 200:
                break
            time.sleep(0.1)
        assert [step for _, step, _ in points] == list(range(200)), points
        assert "errors" in ask("histograms/tags")["line"] and "line" in ask("images/tags")["line"]
        assert "note" in ask("text/tags")["line"]
        print("TensorBoard's server: the same")
    finally:
        server.terminate()
        server.wait(timeout=30)
