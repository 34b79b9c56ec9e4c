//! Dates for chat templates.
//!
//! Owns: `strftime` in UTC. Never: reads the clock. Invariant: an unknown directive stays as
//! written.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Formats a time, in seconds since 1970 UTC, as Python's `strftime` does in the C locale.
pub(crate) fn strftime(format: &str, seconds: u64) -> String {
    let date = CalendarDate::of(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
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
        let two = |number: u64| {
            if unpadded {
                number.to_string()
            } else {
                format!("{number:02}")
            }
        };
        let text = match directive {
            Some('Y') => date.year.to_string(),
            Some('y') => two(date.year % 100),
            Some('m') => two(date.month),
            Some('d') => two(date.day),
            Some('e') => format!("{:2}", date.day),
            Some('B') => MONTHS[date.month as usize - 1].to_owned(),
            Some('b' | 'h') => MONTHS[date.month as usize - 1][..3].to_owned(),
            Some('A') => DAYS[date.weekday as usize].to_owned(),
            Some('a') => DAYS[date.weekday as usize][..3].to_owned(),
            Some('w') => date.weekday.to_string(),
            Some('j') if unpadded => date.yearday.to_string(),
            Some('j') => format!("{:03}", date.yearday),
            Some('H') => two(hour),
            Some('I') => two(twelve),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", date.year, date.month, date.day),
            Some('T' | 'X') => format!("{hour:02}:{minute:02}:{second:02}"),
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

struct CalendarDate {
    year: u64,
    month: u64,
    day: u64,
    weekday: u64,
    yearday: u64,
}

impl CalendarDate {
    /// Counts through years and months: exact, and fast enough for one call per template.
    fn of(days: u64) -> Self {
        let leap = |year: u64| {
            (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400)
        };
        let (mut year, mut left) = (1970, days);
        while left >= 365 + u64::from(leap(year)) {
            left -= 365 + u64::from(leap(year));
            year += 1;
        }
        let yearday = left + 1;
        let february = 28 + u64::from(leap(year));
        let mut month = 1;
        for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
            if left < length {
                break;
            }
            left -= length;
            month += 1;
        }
        Self {
            year,
            month,
            day: left + 1,
            weekday: (days + 4) % 7,
            yearday,
        }
    }
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
