"""Checks our manifests for Kubernetes against the schemas of the projects that read them.

    schemas.py TRAINER JOBSET TRAINING_OPERATOR

The three are checkouts of kubeflow/trainer (v2), kubernetes-sigs/jobset and kubeflow/training-operator (v1.9, the last that has PyTorchJob): their
CustomResourceDefinitions are read. The kinds of Kubernetes itself are compared with the classes of PyPI's package kubernetes. A field that is
not in a schema is an error: an API server drops it, with a warning at most.
"""

import pathlib
import re
import sys

import jsonschema
import kubernetes.client as core
import yaml

MANIFESTS = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes"
CORE = {("v1", "Service"): "V1Service", ("batch/v1", "Job"): "V1Job"}
# What an API server takes as a number or a string, by the names of the classes.
SCALARS = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str}


def definitions(folder):
    """The schema of each version of each kind that the checkout defines."""
    found = {}
    paths = [path for path in folder.rglob("*.yaml") if path.parent.name in ("crds", "bases")]
    for path in paths:
        for document in yaml.safe_load_all(path.read_text()):
            if not document or document.get("kind") != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                found[key] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema):
    """The same as a JSON schema: unknown fields are refused, and an int-or-string is either."""
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if key not in ("format", "default", "description", "properties", "items")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if "items" in schema:
        made["items"] = strict(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(schema["additionalProperties"])
    if "properties" in schema:
        made["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    return made


METADATA = {"name", "labels", "annotations", "namespace"}


def against_definition(manifest, schema):
    # Metadata is Kubernetes' own, and a definition says no more of it than that it is an object.
    schema = {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}
    unknown = set(manifest["metadata"]) - METADATA
    errors = [f"metadata: unknown field {name}" for name in sorted(unknown)]
    for error in jsonschema.Draft7Validator(schema).iter_errors(manifest):
        errors.append(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}")
    return errors


def against_class(value, kind, path):
    """`value` against a class of the client, or a type as it writes them: List[V1Container], Dict[str, str]."""
    if kind == "object":
        return []
    listed = re.fullmatch(r"[Ll]ist\[(.+)\]", kind)
    if listed:
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        return [error for at, item in enumerate(value) for error in against_class(item, listed[1], f"{path}.{at}")]
    mapped = re.fullmatch(r"[Dd]ict[(\[](.+?), (.+)[)\]]", kind)
    if mapped:
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is no map"]
        return [error for name, item in value.items() for error in against_class(item, mapped[2], f"{path}.{name}")]
    if kind in SCALARS:
        is_right = isinstance(value, SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if is_right else [f"{path}: {value!r} is no {kind}"]
    model = getattr(core, kind)
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no {kind}"]
    names = {outside: inside for inside, outside in model.attribute_map.items()}
    errors = [f"{path}: unknown field {name}" for name in value if name not in names]
    known = {name: item for name, item in value.items() if name in names}
    for name, item in known.items():
        errors += against_class(item, model.openapi_types[names[name]], f"{path}.{name}")
    try:  # Its constructor refuses what lacks a required field.
        model(**{names[name]: item for name, item in known.items()})
    except ValueError as error:
        errors.append(f"{path}: {error}")
    return errors


def check(manifest, schemas):
    key = manifest["apiVersion"], manifest["kind"]
    if key in CORE:
        return against_class(manifest, CORE[key], key[1])
    if key not in schemas:
        return [f"no checkout defines {key[1]} of {key[0]}"]
    return against_definition(manifest, schemas[key])


def all_maps(value, path=()):
    """The path of each map in a manifest but those whose keys are the user's."""
    if isinstance(value, dict):
        if not path or path[-1] not in ("labels", "annotations", "limits", "selector", "pytorchReplicaSpecs"):
            yield path
        for name, item in value.items():
            yield from all_maps(item, (*path, name))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from all_maps(item, (*path, at))


def with_unknown(value, path):
    if not path:
        return {**value, "phalanxUnknown": 1}
    copy = value.copy()
    copy[path[0]] = with_unknown(value[path[0]], path[1:])
    return copy


def main():
    if len(sys.argv) != 4:
        sys.exit(f"say where the checkouts are: {sys.argv[0]} TRAINER JOBSET TRAINING_OPERATOR (.ci/full kubernetes-schemas names the variables)")
    schemas = {}
    for folder in map(pathlib.Path, sys.argv[1:]):
        found = definitions(folder)
        if not found:
            sys.exit(f"{folder} has no CustomResourceDefinition: is it a checkout?")
        schemas.update(found)
    failed = False
    paths = sorted(MANIFESTS.glob("*.yaml"))
    for path in paths:
        for manifest in yaml.safe_load_all(path.read_text()):
            errors = check(manifest, schemas)
            failed = failed or bool(errors)
            for error in errors:
                print(f"{path.name}: {manifest['kind']}: {error}")
            # The check itself: an unknown field must be found wherever it is put.
            places = list(all_maps(manifest))
            unseen = [at for at in places if not check(with_unknown(manifest, at), schemas)]
            failed = failed or bool(unseen)
            for at in unseen:
                print(f"{path.name}: {manifest['kind']}: an unknown field at {at} is not found")
            print(f"{path.name}: {manifest['kind']} of {manifest['apiVersion']}, {len(places)} places: {'wrong' if errors else 'right'}")
    if failed or not paths:
        sys.exit("FAILED")


main()
