//! Fleets of one kind of device, as a line of text.
//!
//! Owns: the number of workers of each role. Never: compares fleets; see `compare`. Invariant: a
//! parsed fleet has a worker for each leg.

use super::{WorkerDevice, WorkerProfile};
use cleave_domain::Role;
use std::fmt;
use std::str::FromStr;

/// A number of workers for each role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetSpec {
    pub profile: WorkerProfile,
    pub prefill: u32,
    pub decode: u32,
    pub both: u32,
}

impl FleetSpec {
    /// A fleet in which every worker does both legs.
    pub fn aggregated(profile: WorkerProfile, workers: u32) -> Self {
        Self {
            profile,
            prefill: 0,
            decode: 0,
            both: workers,
        }
    }

    /// The number of workers of any role.
    pub fn workers_count(&self) -> u32 {
        self.prefill + self.decode + self.both
    }

    pub fn devices_count(&self) -> u32 {
        self.workers_count() * self.profile.devices_count()
    }

    /// The workers: prefill workers first, then decode workers, then the others.
    pub fn devices(&self) -> Vec<WorkerDevice> {
        let roles = [
            (Role::Prefill, self.prefill),
            (Role::Decode, self.decode),
            (Role::Both, self.both),
        ];
        let all = roles
            .into_iter()
            .flat_map(|(role, count)| std::iter::repeat_n(role, count as usize));
        all.zip(0..)
            .map(|(role, number)| self.profile.device(number, role))
            .collect()
    }
}

impl fmt::Display for FleetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in [
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("both", self.both),
        ] {
            if count > 0 {
                write!(f, "{name}={count},")?;
            }
        }
        write!(f, "profile={}", self.profile.name)
    }
}

/// A fleet as a line of text gives it, which may leave the profile to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetText {
    pub profile: Option<WorkerProfile>,
    prefill: u32,
    decode: u32,
    both: u32,
}

impl FleetText {
    /// The number of workers of any role.
    pub fn workers_count(&self) -> u32 {
        self.prefill + self.decode + self.both
    }

    /// The fleet of workers of this profile, whichever the text names.
    pub fn of(&self, profile: WorkerProfile) -> FleetSpec {
        FleetSpec {
            profile,
            prefill: self.prefill,
            decode: self.decode,
            both: self.both,
        }
    }
}

impl FromStr for FleetSpec {
    type Err = String;

    /// Such as `prefill=4,decode=4,profile=h100-llama-3-8b`; `both=N` too.
    fn from_str(text: &str) -> Result<Self, String> {
        let fleet: FleetText = text.parse()?;
        let profile = fleet.profile.clone().ok_or("a fleet needs profile=NAME")?;
        Ok(fleet.of(profile))
    }
}

impl FromStr for FleetText {
    type Err = String;

    /// As a [`FleetSpec`], with or without `profile=NAME`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (mut prefill, mut decode, mut both, mut profile) = (0, 0, 0, None);
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let (name, value) = part
                .trim()
                .split_once('=')
                .ok_or_else(|| format!("`{part}` of a fleet is not name=value"))?;
            let count = || {
                let count = value.parse::<u32>().ok().filter(|count| *count <= 100_000);
                count.ok_or_else(|| format!("{name}={value}: expected a count up to 100000"))
            };
            match name {
                "prefill" => prefill = count()?,
                "decode" => decode = count()?,
                "both" => both = count()?,
                "profile" => profile = Some(WorkerProfile::named(value)?),
                _ => {
                    return Err(format!(
                        "`{name}` of a fleet is unknown; there are prefill, decode, both and profile"
                    ));
                }
            }
        }
        if both == 0 && (prefill == 0 || decode == 0) {
            return Err("a fleet needs workers for both legs: prefill=N,decode=N or both=N".into());
        }
        Ok(Self {
            profile,
            prefill,
            decode,
            both,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{FleetSpec, FleetText, WorkerProfile};

    #[test]
    fn a_fleet_without_a_profile_takes_another() {
        let text: FleetText = "prefill=2,decode=3".parse().unwrap();
        assert_eq!((text.workers_count(), &text.profile), (5, &None));
        let profile = WorkerProfile::named("a100-opt-13b").unwrap();
        assert_eq!(
            text.of(profile).to_string(),
            "prefill=2,decode=3,profile=a100-opt-13b"
        );
    }

    #[test]
    fn fleet_specs_are_parsed_and_mistakes_named() {
        let text = "prefill=2,decode=3,profile=a100-opt-13b";
        let fleet: FleetSpec = text.parse().unwrap();
        assert_eq!(fleet.to_string(), text);
        assert_eq!(fleet.devices().len(), 5);
        let wrong = [
            ("both=2", "profile"),
            ("prefill=2,profile=a100-opt-13b", "both legs"),
            ("prefill=x,profile=a100-opt-13b", "prefill=x"),
            ("towers=1", "towers"),
            ("both", "name=value"),
        ];
        for (text, message) in wrong {
            let error = text.parse::<FleetSpec>().unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
