//! Plots as SVG text.
//!
//! Owns: scales, ticks and marks. Never: knows the meaning of a number; loads nothing. Invariant:
//! for any numbers the text is well-formed and contains only finite ones.
//!
//! Colours are CSS variables (`--c0` to `--c6`, `--ink`, `--line`), so that the page decides on
//! light or dark; where colours repeat, dashes distinguish lines.

use std::fmt::Write;

/// Size in the plot's own units; the page scales it.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 40.0;
const COLOURS: usize = 7;
const DASHES: [&str; 3] = ["", "7 3", "2 3"];

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AxisScale {
    Linear,
    /// For positive numbers of several magnitudes.
    Log,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PlotAxis<'a> {
    pub(crate) name: &'a str,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) steps: AxisScale,
}

impl<'a> PlotAxis<'a> {
    /// An axis from 0 to a little above the largest number.
    pub(crate) fn from_zero(name: &'a str, numbers: impl Iterator<Item = f64>) -> Self {
        let most = numbers.filter(|n| n.is_finite()).fold(0.0, f64::max);
        Self {
            name,
            from: 0.0,
            to: if most > 0.0 { most * 1.05 } else { 1.0 },
            steps: AxisScale::Linear,
        }
    }

    /// An axis of positive numbers, logarithmic if the largest is far above the smallest.
    pub(crate) fn from_zero_or_log(
        name: &'a str,
        numbers: impl Iterator<Item = f64> + Clone,
    ) -> Self {
        let sound = numbers.filter(|n| n.is_finite() && *n > 0.0);
        let most = sound.clone().fold(0.0, f64::max);
        let least = sound.fold(f64::INFINITY, f64::min);
        if most > 30.0 * least {
            return Self {
                name,
                // Numbers five magnitudes below the largest are clipped.
                from: (least / 1.1).max(most / 1e5),
                to: (most * 1.1).min(f64::MAX),
                steps: AxisScale::Log,
            };
        }
        Self::from_zero(name, [most].into_iter())
    }

    /// The place of a number along the axis, from 0 to 1.
    fn fraction(&self, number: f64) -> f64 {
        let fraction = match self.steps {
            AxisScale::Linear => (number - self.from) / (self.to - self.from),
            AxisScale::Log => {
                let least = number.max(self.from);
                (least / self.from).ln() / (self.to / self.from).ln()
            }
        };
        if fraction.is_finite() {
            fraction.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    fn ticks(&self) -> Vec<f64> {
        match self.steps {
            AxisScale::Linear => {
                // About five ticks, at a round step of 1, 2, 5 or 10 times a power of ten.
                let rough = (self.to - self.from) / 5.0;
                let size = 10_f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * size);
                let step = step
                    .into_iter()
                    .find(|step| *step >= rough)
                    .unwrap_or(rough);
                let first = (self.from / step).ceil() as i64;
                let last = (self.to / step).floor() as i64;
                (first..=last)
                    .take(12)
                    .map(|index| index as f64 * step)
                    .collect()
            }
            AxisScale::Log => {
                let (from, to) = (
                    self.from.log10().floor() as i32,
                    self.to.log10().ceil() as i32,
                );
                let factors: &[f64] = if to - from > 3 {
                    &[1.0]
                } else {
                    &[1.0, 2.0, 5.0]
                };
                let all = (from..=to).flat_map(|power| {
                    factors
                        .iter()
                        .map(move |factor| factor * 10_f64.powi(power))
                });
                all.filter(|tick| (self.from..=self.to).contains(tick))
                    .collect()
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum PlotMark {
    /// A line through points.
    Line(Vec<(f64, f64)>),
    /// Points with intervals: (x, y, low, high).
    Points(Vec<(f64, f64, f64, f64)>),
    /// Bars from 0 up: their left ends and heights, and one width.
    Bars(Vec<(f64, f64)>, f64),
    /// A dashed horizontal line at this height.
    Horizontal(f64),
    /// A dashed vertical line at this place.
    Vertical(f64),
}

/// A mark in one colour.
#[derive(Clone, Debug)]
pub(crate) struct PlotSeries {
    /// The name in the legend; not shown if empty.
    pub(crate) name: String,
    pub(crate) colour: usize,
    pub(crate) mark: PlotMark,
}

#[derive(Clone, Debug)]
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: PlotAxis<'a>,
    pub(crate) y: PlotAxis<'a>,
    pub(crate) series: Vec<PlotSeries>,
}

impl Plot<'_> {
    pub(crate) fn svg(&self) -> String {
        let mut out = String::new();
        let title = escape_html(self.title);
        append(
            &mut out,
            format_args!(
                "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\
             <text x=\"{LEFT}\" y=\"16\" class=\"title\">{title}</text>"
            ),
        );
        self.grid(&mut out);
        for series in &self.series {
            self.draw(&mut out, series);
        }
        self.legend(&mut out);
        out.push_str("</svg>");
        out
    }

    fn x(&self, number: f64) -> f64 {
        LEFT + self.x.fraction(number) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, number: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.fraction(number) * (HEIGHT - TOP - BOTTOM)
    }

    fn grid(&self, out: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in self.y.ticks() {
            let (y, text) = (self.y(tick), format_number(tick));
            append(
                out,
                format_args!(
                    "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"grid\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                    LEFT - 5.0,
                    y + 3.5
                ),
            );
        }
        for tick in self.x.ticks() {
            let (x, text) = (self.x(tick), format_number(tick));
            append(
                out,
                format_args!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" class=\"grid\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
                    bottom + 14.0
                ),
            );
        }
        append(
            out,
            format_args!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(11 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
                (LEFT + right) / 2.0,
                HEIGHT - 8.0,
                escape_html(self.x.name),
                (TOP + bottom) / 2.0,
                escape_html(self.y.name)
            ),
        );
    }

    fn draw(&self, out: &mut String, series: &PlotSeries) {
        let colour = series.colour % COLOURS;
        match &series.mark {
            PlotMark::Line(points) => {
                let dash = DASHES[(series.colour / COLOURS) % DASHES.len()];
                let points = points
                    .iter()
                    .map(|(x, y)| format!("{:.1},{:.1}", self.x(*x), self.y(*y)));
                let points: Vec<String> = points.collect();
                append(
                    out,
                    format_args!(
                        "<polyline points=\"{}\" fill=\"none\" stroke=\"var(--c{colour})\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/>",
                        points.join(" ")
                    ),
                );
            }
            PlotMark::Points(points) => {
                for (x, y, low, high) in points {
                    let at = self.x(*x);
                    append(
                        out,
                        format_args!(
                            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"var(--c{colour})\" stroke-width=\"1.5\"/>\
                         <circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"var(--c{colour})\"><title>{}: {}</title></circle>",
                            self.y(*low),
                            self.y(*high),
                            self.y(*y),
                            format_number(*x),
                            format_number(*y)
                        ),
                    );
                }
            }
            PlotMark::Bars(bars, width) => {
                for (x, y) in bars.iter().filter(|(_, y)| *y > 0.0) {
                    let (from, top) = (self.x(*x), self.y(*y));
                    append(
                        out,
                        format_args!(
                            "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"var(--c{colour})\" opacity=\"0.75\"/>",
                            (self.x(x + width) - from).max(0.8),
                            (self.y(0.0) - top).max(0.0)
                        ),
                    );
                }
            }
            PlotMark::Horizontal(at) => {
                let y = self.y(*at);
                append(
                    out,
                    format_args!(
                        "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"var(--c{colour})\" stroke-dasharray=\"4 4\"/>",
                        WIDTH - RIGHT
                    ),
                );
            }
            PlotMark::Vertical(at) => {
                let x = self.x(*at);
                append(
                    out,
                    format_args!(
                        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{}\" stroke=\"var(--c{colour})\" stroke-dasharray=\"4 4\"/>",
                        HEIGHT - BOTTOM
                    ),
                );
            }
        }
    }

    /// Names in their colours, right-aligned in the title's line.
    fn legend(&self, out: &mut String) {
        let named = self.series.iter().filter(|series| !series.name.is_empty());
        let spans: Vec<String> = named
            .map(|series| {
                let colour = series.colour % COLOURS;
                format!(
                    "<tspan fill=\"var(--c{colour})\"> ■ {}</tspan>",
                    escape_html(&series.name)
                )
            })
            .collect();
        append(
            out,
            format_args!(
                "<text x=\"{:.1}\" y=\"16\" text-anchor=\"end\" class=\"legend\">{}</text>",
                WIDTH - RIGHT,
                spans.concat()
            ),
        );
    }
}

/// Appends to a text.
pub(crate) fn append(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text)
        .expect("writing to a string cannot fail");
}

/// Formats a number with about three digits.
pub(crate) fn format_number(number: f64) -> String {
    let size = number.abs();
    match size {
        _ if !number.is_finite() => "–".to_owned(),
        0.0 => "0".to_owned(),
        _ if size >= 100.0 => format!("{number:.0}"),
        _ if size >= 10.0 => trim_zeros(format!("{number:.1}")),
        _ if size >= 1.0 => trim_zeros(format!("{number:.2}")),
        _ => trim_zeros(format!("{number:.3}")),
    }
}

fn trim_zeros(text: String) -> String {
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Escapes text for HTML and SVG, attributes included.
pub(crate) fn escape_html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ticks_are_round_numbers_within_the_axis() {
        let even = PlotAxis {
            name: "",
            from: 0.0,
            to: 1.05,
            steps: AxisScale::Linear,
        };
        let rounded: Vec<f64> = even
            .ticks()
            .iter()
            .map(|t| (t * 100.0).round() / 100.0)
            .collect();
        assert_eq!(rounded, [0.0, 0.5, 1.0]);
        let log = PlotAxis::from_zero_or_log("", [3.0, 40.0, 900.0].into_iter());
        assert_eq!(log.steps, AxisScale::Log);
        assert_eq!(log.ticks(), [5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]);
        let wide = PlotAxis::from_zero_or_log("", [f64::MIN_POSITIVE, f64::MAX].into_iter());
        assert!(wide.to.is_finite() && wide.ticks().len() < 1000, "{wide:?}");
    }

    proptest! {
        #[test]
        fn plots_of_any_numbers_are_well_formed(numbers in proptest::collection::vec(proptest::num::f64::ANY, 0..9)) {
            let pairs: Vec<(f64, f64)> = numbers.iter().map(|n| (*n, *n)).collect();
            let points = numbers.iter().map(|n| (*n, *n, *n, *n)).collect();
            let marks = [PlotMark::Line(pairs.clone()), PlotMark::Points(points), PlotMark::Bars(pairs, 1.0), PlotMark::Horizontal(f64::NAN)];
            for axis in [PlotAxis::from_zero, |name, numbers: std::vec::IntoIter<f64>| PlotAxis::from_zero_or_log(name, numbers)] {
                let plot = Plot {
                    title: "a<b",
                    x: axis("x", numbers.clone().into_iter()),
                    y: axis("y", numbers.clone().into_iter()),
                    series: marks.iter().cloned().enumerate()
                        .map(|(colour, mark)| PlotSeries { name: "n&".into(), colour, mark }).collect(),
                };
                let svg = plot.svg();
                prop_assert!(!svg.contains("NaN") && !svg.contains("inf"), "{}", svg);
                prop_assert!(svg.contains("a&lt;b") && svg.contains("n&amp;"));
            }
        }
    }
}
