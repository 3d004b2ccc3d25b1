"""Read pip's settings, and pass them on to uv, which reads none of them; old syntax."""

import configparser
import contextlib
import os
import re
from pathlib import Path

SYSTEM = Path("/etc")
PACKAGES = ("index-url", "extra-index-url", "find-links", "no-index", "constraint")  # which to take
NO = ("", "0", "no", "false", "off", "n", "f")
UV = (  # a setting of pip, what it is for uv, and what uv puts between several values
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("no-cache-dir", "UV_NO_CACHE", ""),
    ("cert", "SSL_CERT_FILE", " "),
    ("client-cert", "SSL_CLIENT_CERT", " "),
    ("timeout", "UV_HTTP_TIMEOUT", " "),
    ("default-timeout", "UV_HTTP_TIMEOUT", " "),
    ("retries", "UV_HTTP_RETRIES", " "),
    ("proxy", "ALL_PROXY", " "),
)
KEYRINGS = ("subprocess", "disabled")  # of uv; pip has "import" too, and "auto" says nothing


def pip_settings():
    """Return what the user told pip: for each setting its value, and where it stands."""
    settings = {}
    for section in ("global", "install"):  # the order of pip: what comes later wins
        for path in config_files():
            found = configparser.RawConfigParser()
            with contextlib.suppress(configparser.Error, OSError, UnicodeError):  # pip complains
                found.read(str(path))
            for option, value in found.items(section) if found.has_section(section) else []:
                settings[option.replace("_", "-")] = (value, f"{option} in {path}")
    for variable, value in os.environ.items():
        if variable.startswith("PIP_") and value:
            settings[variable[4:].lower().replace("_", "-")] = (value, variable)
    return settings


def own_setting():
    """Return where the user told pip which packages to take; "" where nothing does."""
    settings = pip_settings()
    return next((settings[name][1] for name in PACKAGES if name in settings), "")


def config_files():
    """Return the configuration files that pip reads before it knows of our environment."""
    named = os.environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:  # pip's way to say: none at all
        return []
    folders = os.environ.get("XDG_CONFIG_DIRS") or str(SYSTEM / "xdg")
    files = [Path(folder, "pip", "pip.conf") for folder in folders.split(os.pathsep)]
    files.append(SYSTEM / "pip.conf")
    if named and Path(named).exists():
        return [*files, Path(named)]
    home = Path(os.path.expanduser("~"))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or str(home / ".config"))
    return [*files, home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]


def uv_options():
    """Return the options of uv for those of pip's settings that no variable passes on.

    require-virtualenv needs none: the course's environment is one.
    """
    settings = pip_settings()
    options = ["--no-index"] * is_on(settings, "no-index")
    for name in ("constraint", "no-binary", "only-binary"):
        between = r"\s+" if name == "constraint" else r"[\s,]+"
        for word in filter(None, re.split(between, settings.get(name, ("",))[0])):
            options += ["--" + name, word]
    return options


def unknown_to_uv():
    """Return a sentence for each setting of pip that uv does not follow."""
    value, where = pip_settings().get("keyring-provider", ("", ""))
    if value.strip() in ("", "auto", *KEYRINGS):
        return []
    return [
        f"uv has no keyring-provider {value.strip()} ({where}), so where a registry asks for a "
        "password pip installs, which takes longer. Try keyring-provider subprocess"
    ]


def is_on(settings, name):
    """True if a setting that is on or off is on."""
    return settings.get(name, ("",))[0].strip().lower() not in NO


def uv_environment():
    """Return the environment variables for uv: pip's settings, where uv has no own ones."""
    settings = pip_settings()
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best of all indexes
    if settings.get("cache-dir", ("",))[0].strip():  # a disk with room
        variables["UV_CACHE_DIR"] = os.path.join(settings["cache-dir"][0].strip(), "uv")
    if settings.get("keyring-provider", ("",))[0].strip() in KEYRINGS:
        variables["UV_KEYRING_PROVIDER"] = settings["keyring-provider"][0].strip()
    if is_on(settings, "pre"):
        variables["UV_PRERELEASE"] = "allow"
    for name, variable, between in UV:
        value = settings.get(name, ("",))[0]
        if not between and is_on(settings, name):
            variables[variable] = "1"
        elif between and value.strip():
            variables[variable] = between.join(value.split())
    variables.update(os.environ)
    return variables
