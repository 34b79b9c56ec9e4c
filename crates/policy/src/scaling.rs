//! The `scaling` section of a policy's file.
//!
//! Owns: its keys, and the ranges of their numbers. Never decides how many workers there are to be.

use super::class::narrow_checked;
use cleave_domain::{PoolScaling, Role, ScalingMode, ScalingPolicy};
use cleave_yaml::{Diagnostics, YamlNode, YamlValue};

/// Far above any fleet.
const DEVICES_MAX: i64 = 100_000;
const POOLS: [(Role, &str); 3] = [
    (Role::Prefill, "prefill"),
    (Role::Decode, "decode"),
    (Role::Both, "both"),
];

pub(super) fn scaling(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<ScalingPolicy> {
    let mut fields = diagnostics.fields(node, "`scaling`")?;
    let mode = fields.take("mode");
    let devices_max = fields.take_required("devices_max", diagnostics);
    let pools = fields.take_required("pools", diagnostics);
    let flip = fields.take("flip");
    let idle_after = fields.take("idle_after");
    let start_max = fields.take("start_max");
    let turns_max = fields.take("turns_max");
    fields.reject_unknown(diagnostics);

    let devices =
        devices_max.and_then(|n| diagnostics.integer(n, "devices_max", &(1..=DEVICES_MAX)));
    let mut scaling = ScalingPolicy::new(devices.map_or(1, narrow_checked));
    scaling.mode = mode.map_or(scaling.mode, |node| mode_of(node, diagnostics));
    scaling.flip = flip
        .and_then(|n| diagnostics.boolean(n, "flip"))
        .unwrap_or(true);
    let idle_after = idle_after.and_then(|n| diagnostics.time(n, "idle_after"));
    scaling.idle_after = idle_after.unwrap_or(scaling.idle_after);
    let start_max = start_max.and_then(|n| diagnostics.time(n, "start_max"));
    scaling.start_max = start_max.unwrap_or(scaling.start_max);
    let turns = turns_max.and_then(|n| diagnostics.integer(n, "turns_max", &(2..=3600)));
    scaling.turns_max = turns.map_or(scaling.turns_max, narrow_checked);

    let pools_node = pools?;
    let mut named = diagnostics.fields(pools_node, "`pools`")?;
    for (role, key) in POOLS {
        if let Some(node) = named.take(key) {
            *scaling.pool_mut(role) = pool(node, role, diagnostics)?;
        }
    }
    named.reject_unknown(diagnostics);
    devices?;
    check(&scaling, pools_node, diagnostics).then_some(scaling)
}

fn mode_of(node: &YamlNode, diagnostics: &mut Diagnostics) -> ScalingMode {
    match &node.value {
        YamlValue::Text(word) if word == "act" => ScalingMode::Act,
        YamlValue::Text(word) if word == "advise" => ScalingMode::Advise,
        _ => {
            let message = "`mode` is act (workers are started and stopped, and change their leg) or \
                        advise (numbers are shown, and nothing changes)";
            diagnostics.add(node.referenced, message);
            ScalingMode::Advise
        }
    }
}

fn pool(node: &YamlNode, role: Role, diagnostics: &mut Diagnostics) -> Option<PoolScaling> {
    let mut fields = diagnostics.fields(node, "a pool")?;
    let min = fields.take("min");
    let max = fields.take_required("max", diagnostics);
    let devices = fields.take("devices");
    let up_after = fields.take("up_after");
    let down_after = fields.take("down_after");
    fields.reject_unknown(diagnostics);

    let defaults = PoolScaling::absent(role);
    let max_node = max?;
    let max = diagnostics.integer(max_node, "max", &(0..=4096));
    let min_of = |node| diagnostics.integer(node, "min", &(0..=4096));
    let min = min.map_or(Some(0), min_of);
    let devices = devices.map_or(Some(1), |n| diagnostics.integer(n, "devices", &(1..=1024)));
    let up_after = up_after.map_or(Some(defaults.up_after), |n| diagnostics.time(n, "up_after"));
    let down_after = down_after.map_or(Some(defaults.down_after), |n| {
        diagnostics.time(n, "down_after")
    });
    let pool = PoolScaling {
        min: narrow_checked(min?),
        max: narrow_checked(max?),
        devices: narrow_checked(devices?),
        up_after: up_after?,
        down_after: down_after?,
    };
    if pool.min > pool.max {
        let message = format!(
            "`max` is {}, less than `min`, which is {}",
            pool.max, pool.min
        );
        diagnostics.add(max_node.referenced, message);
    }
    Some(pool)
}

/// Checks that such a fleet can exist, and can serve.
fn check(scaling: &ScalingPolicy, pools: &YamlNode, diagnostics: &mut Diagnostics) -> bool {
    if !scaling.can_serve() {
        let message = "no request could be served: `pools` needs `prefill` and `decode` with a `max` \
                    above 0, or `both`";
        diagnostics.add(pools.referenced, message);
        return false;
    }
    let pools_of = |count: fn(&PoolScaling) -> u32| -> u64 {
        let of = |(role, _): (Role, &str)| {
            let pool = scaling.pool(role);
            u64::from(count(pool)) * u64::from(pool.devices)
        };
        POOLS.into_iter().map(of).sum()
    };
    let least = pools_of(|pool| pool.min).max(devices_min(scaling));
    let devices_max = scaling.devices_max;
    if least > u64::from(devices_max) {
        let message = format!(
            "`devices_max` is {devices_max}, and the pools take {least} devices at least (each \
             `min`, and one worker for each leg)"
        );
        diagnostics.add(pools.referenced, message);
        return false;
    }
    true
}

/// The devices of the smallest fleet that serves.
fn devices_min(scaling: &ScalingPolicy) -> u64 {
    let (prefill, decode, both) = (&scaling.prefill, &scaling.decode, &scaling.both);
    let split = u64::from(prefill.devices) + u64::from(decode.devices);
    match (prefill.max > 0 && decode.max > 0, both.max > 0) {
        (true, true) => split.max(u64::from(both.devices)),
        (true, false) => split,
        (false, _) => u64::from(both.devices),
    }
}
