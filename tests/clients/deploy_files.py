"""Prints plists and YAML files as one JSON object: file name to content."""

import json
import plistlib
import sys

import yaml


def read(name):
    with open(name, "rb") as file:
        return plistlib.load(file) if name.endswith(".plist") else yaml.safe_load(file)


json.dump({name: read(name) for name in sys.argv[1:]}, sys.stdout)
