#!/usr/bin/env python3
"""Shares by dominant resource fairness, from its definition: an opinion that knows nothing of Slipway's.

Reads {"mixes": [{"executors": [{"capacity": C, "resource": r}, ...],
                  "tenants": [{"executors": [j, ...], "weight": w, "cap": c or null}, ...]}, ...]}
and writes a list of lists: the bytes per second of each tenant of each mix.

A tenant moves the same bytes through each of its executors. A resource has one second in each second, and a
byte takes 1/C of it on each executor that lies there. The dominant share of a tenant is the largest part of
any resource that it takes. The fair allocation is the one in which nobody's dominant share, by weight, can
be made larger without making one smaller that is no larger. It is found by raising one water level: each
tenant stands as high as the level, or where the level stood when a resource of its own was full.
"""

import json
import sys

FULL = 1e-9


def costs(mix, tenant):
    """Seconds of each resource that a byte of the tenant takes."""
    seconds = {}
    for index in tenant["executors"]:
        executor = mix["executors"][index]
        resource = executor["resource"]
        seconds[resource] = seconds.get(resource, 0.0) + 1.0 / executor["capacity"]
    return seconds


def rate_at(tenant, seconds, level):
    """Bytes per second at which the tenant's dominant share is `level` times its weight, or its cap."""
    rate = level * tenant["weight"] / max(seconds.values())
    return rate if tenant["cap"] is None else min(rate, tenant["cap"])


def load(rates, all_seconds):
    """How full each resource is."""
    total = {}
    for rate, seconds in zip(rates, all_seconds):
        for resource, byte in seconds.items():
            total[resource] = total.get(resource, 0.0) + rate * byte
    return total


def allocation(mix):
    tenants = mix["tenants"]
    seconds = [costs(mix, tenant) for tenant in tenants]
    stopped = [None] * len(tenants)  # the level at which it was stopped

    def rates(level):
        return [rate_at(tenant, cost, level if at is None else at)
                for tenant, cost, at in zip(tenants, seconds, stopped)]

    def fits(level):
        return all(used <= 1.0 for used in load(rates(level), seconds).values())

    # Beyond this nobody rises: everybody has a resource to himself, or a cap below it.
    top = 2.0 * max(1.0 / tenant["weight"] for tenant in tenants)
    while None in stopped:
        low, high = 0.0, top
        if fits(high):
            break  # caps stop those who are left
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        full = {resource for resource, used in load(rates(low), seconds).items() if used >= 1.0 - FULL}
        assert full, "the water stopped and nothing is full"
        for index, cost in enumerate(seconds):
            if stopped[index] is None and full & set(cost):
                stopped[index] = low
    return rates(top)


def main():
    # The example of the talk first: without it nothing below means anything.
    talk = {"executors": [{"capacity": 100.0, "resource": 0}, {"capacity": 60.0, "resource": 1}],
            "tenants": [{"executors": [0, 1], "weight": 1.0, "cap": None},
                        {"executors": [0], "weight": 1.0, "cap": None}]}
    assert [round(rate, 6) for rate in allocation(talk)] == [37.5, 62.5]
    json.dump([allocation(mix) for mix in json.load(sys.stdin)["mixes"]], sys.stdout)


if __name__ == "__main__":
    main()
