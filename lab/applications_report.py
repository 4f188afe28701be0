"""The statistics and the table of lab/applications, with FastIOV's words beside."""

import statistics

ARMS = {
    "veth": "a sandbox with the interface of a veth pair in a bridge",
    "slipway": "a sandbox in Slipway's network",
    "pool": "the same, with a function of a pool",
    "runc": "a container of runc's with a veth pair in the same bridge",
}
# Words of FastIOV, section 6.6: a completion time is so many percent less than with SR-IOV before it. What the
# applications between these two have is in a figure only.
PAPER = {
    "what": "FastIOV, 200 containers on 2 x 28 cores with KVM, against SR-IOV before it",
    "mean_less_percent": {"image": 53.5, "inference": 12.1},
    "p99_less_percent": [20.3, 53.7],
}


def percentile(values, percent):
    """The least value that `percent` of the values do not exceed (nearest rank)."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def summary(found):
    """Returns the statistics of each application and way, over all jobs of all rounds."""
    result = {}
    for application, arms in found.items():
        result[application] = {}
        for arm, turns in arms.items():
            done = [one["done_s"] for turn in turns for one in turn]
            result[application][arm] = {
                "mean_s": statistics.mean(done),
                "p50_s": percentile(done, 50),
                "p99_s": percentile(done, 99),
                "asked_mean_s": statistics.mean(one["asked_s"] for turn in turns for one in turn),
            }
        first = next(iter(result[application].values()))
        for one in result[application].values():
            one["less_percent"] = {
                name: 100 * (1 - one[f"{name}_s"] / first[f"{name}_s"]) for name in ("mean", "p99")
            }
    return result


def show(result, known):
    first = known["arms"][0]
    print(f"{'application':<12} {'way':<8} {'mean s':>8} {'p50 s':>8} {'p99 s':>8} {'start s':>8}"
          f"  less than {first}, %: mean, p99; the paper's")
    for application, arms in result.items():
        paper = PAPER["mean_less_percent"].get(application, "in a figure")
        for arm, one in arms.items():
            less = ", ".join(f"{value:.1f}" for value in one["less_percent"].values())
            times = (one[name] for name in ("mean_s", "p50_s", "p99_s", "asked_mean_s"))
            print(f"{application:<12} {arm:<8}", *(f"{value:8.2f}" for value in times), f" {less}; {paper}")
    least, most = PAPER["p99_less_percent"]
    print(f"the paper's: mean of {PAPER['what']}; p99 over the applications {least} to {most} % less")
    print("start: until the input was asked for, mean;", "; ".join(f"{arm}: {ARMS[arm]}" for arm in known["arms"]))
    if known["accelerator"] == "tcg":
        print("Guests ran under software emulation: their times, the jobs' most of all, are no times of a real server.")
