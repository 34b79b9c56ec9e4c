//! Dates for chat templates.
//!
//! Owns: `strftime` in UTC. Never: reads the clock. Invariant: an unknown directive stays as
//! written; the formats of the `time` crate make it an error.

use time::{Duration, OffsetDateTime};

/// Formats a time, in seconds since 1970 UTC, as Python's `strftime` does in the C locale.
pub(crate) fn strftime(format: &str, seconds: u64) -> String {
    let since = Duration::seconds(i64::try_from(seconds).unwrap_or(i64::MAX));
    let time = OffsetDateTime::UNIX_EPOCH.saturating_add(since);
    let (month, weekday) = (time.month().to_string(), time.weekday().to_string());
    let month_number = u8::from(time.month());
    let twelve = (time.hour() + 11) % 12 + 1;
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let two = |number: i32| {
            if unpadded {
                number.to_string()
            } else {
                format!("{number:02}")
            }
        };
        let text = match directive {
            Some('Y') => time.year().to_string(),
            Some('y') => two(time.year() % 100),
            Some('m') => two(month_number.into()),
            Some('d') => two(time.day().into()),
            Some('e') => format!("{:2}", time.day()),
            Some('B') => month.clone(),
            Some('b' | 'h') => month[..3].to_owned(),
            Some('A') => weekday.clone(),
            Some('a') => weekday[..3].to_owned(),
            Some('w') => time.weekday().number_days_from_sunday().to_string(),
            Some('j') if unpadded => time.ordinal().to_string(),
            Some('j') => format!("{:03}", time.ordinal()),
            Some('H') => two(time.hour().into()),
            Some('I') => two(twelve.into()),
            Some('M') => two(time.minute().into()),
            Some('S') => two(time.second().into()),
            Some('p') => if time.hour() < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => time.date().to_string(),
            Some('T' | 'X') => {
                format!(
                    "{:02}:{:02}:{:02}",
                    time.hour(),
                    time.minute(),
                    time.second()
                )
            }
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{other}"),
            None => "%".to_owned(),
        };
        out.push_str(&text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts were printed by Python's `time.strftime(…, time.gmtime(…))`.
    #[test]
    fn strftime_matches_python() {
        let format = "%Y-%m-%d %b %B %a %A %j %H:%M:%S %I %p %-d %y %%";
        assert_eq!(
            strftime(format, 1_709_210_096),
            "2024-02-29 Feb February Thu Thursday 060 12:34:56 12 PM 29 24 %"
        );
        assert_eq!(
            strftime(format, 0),
            "1970-01-01 Jan January Thu Thursday 001 00:00:00 12 AM 1 70 %"
        );
        assert_eq!(strftime("%d %b %Y", 4_102_444_799), "31 Dec 2099");
    }
}
