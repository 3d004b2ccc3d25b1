"""Symptoms of a failed build of the environment, each with what to do; old syntax."""

import re

# by build of PyTorch ("": pip's own choice): 2 or 6 GB installed, and while pip unpacks them
# its downloads, 0.4 or 2.9 GB, twice: in its cache and in the folder for temporary files
NEEDED_GB = {"": 3, "cpu": 3, "gpu": 12}

UNTRUSTED = r"CERTIFICATE_VERIFY_FAILED|SSLError|invalid peer certificate"
SYMPTOMS = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded|Errno 122",
        "The disk filled up on the way. Free {needed} GB where the course lies (and in the folder "
        "for temporary files, TMPDIR), then run make again.",
    ),
    (
        r"ensurepip is not|No module named '?(venv|ensurepip)",
        "Python {version} came without its venv module. Install it (Debian and Ubuntu: apt install "
        "python3-venv), or name another Python: make lab PYTHON=/path/to/python3.12",
    ),
    (
        UNTRUSTED,
        "The package registry's certificate is not trusted here. If your network has its own, set "
        "PIP_CERT to its file, then run make again.",
    ),
    (
        r"(Retrying|Failed|exceeded|Could not fetch|timed out|sending).*(/whl/cpu|"
        r"download\.pytorch\.org)|download\.pytorch\.org.*timed out",
        "The index of PyTorch's CPU builds, download.pytorch.org, cannot be reached. Check the "
        "network, or take the build of pip's usual registry: make lab TORCH=gpu",
    ),
    (
        r"Retrying \(Retry|Failed to establish a new connection|Max retries exceeded|"
        r"Temporary failure in name resolution|Network is unreachable|[Rr]ead timed out|"
        r"ProxyError|Connection broken|Could not fetch URL|error sending request|dns error|"
        r"Could not connect|tcp connect error|operation timed out",
        "The package registry cannot be reached. Check the network (and PIP_INDEX_URL and "
        "HTTPS_PROXY, if you set them), then run make again.",
    ),
    (
        r"(No matching distribution found for|[Bb]ecause there is no version of|[Bb]ecause only .*"
        r"and you require|[Bb]ecause (?=\S+ was not found in the)) ?(?P<what>[\w.+=<>~!\[\]-]+)",
        "The package registry has no {what} for Python {version} on this system. Try another "
        "Python, such as make lab PYTHON=/path/to/python3.12, and look at PIP_INDEX_URL, if set.",
    ),
    (
        r"Permission denied|Errno 13",
        "A folder may not be written to ({line}). Copy the course to your home folder, or put the "
        "environment elsewhere: make lab VENV=/path/of/yours",
    ),
)


class Problem(Exception):
    """Something the person at the keyboard has to know or do, as one sentence."""


def symptom(lines):
    """Return the pattern of the first symptom that lines of output show; None without any."""
    patterns = (pattern for pattern, _ in SYMPTOMS)
    return next((one for one in patterns if any(re.search(one, line) for line in lines)), None)


def explain(lines, version, log=None, build=""):
    """Turn the output of a failed venv, uv or pip into one sentence."""
    pattern = symptom(lines)
    if pattern:
        found = next(filter(None, (re.search(pattern, line) for line in lines)))
        what, needed = found.groupdict().get("what"), NEEDED_GB[build]
        sentence = dict(SYMPTOMS)[pattern]
        return sentence.format(version=version, what=what, line=found.string, needed=needed)
    errors = [line for line in lines if "error" in line.lower()] or lines or ["no word why"]
    where = f" (all that was said is in {log})" if log else ""
    return f"The environment could not be built: {errors[-1].strip()}{where}"
