//! `cleave bench engine`: how fast an engine alone is.
//!
//! Owns: which shapes are measured in which order, and what is printed.
//! Never: takes part in serving.

mod floor;
mod sample;
mod shape;

pub(crate) use floor::Products;
pub(crate) use shape::Shape;

use crate::args::EngineBenchArgs;
use crate::gpu::GpuPart;
use crate::model::{self, Loaded};
use anyhow::bail;
use cleave_cpu::WorkerThreads;
use cleave_engine::EngineLimits;
use floor::{Ceilings, Floor};
use sample::{Bench, Sampled, sequence_tokens};
use serde::Serialize;
use shape::{SHAPES, SHAPES_GPU};
use std::io::{BufRead, Write};
use std::time::Instant;

/// Everything that was measured.
#[derive(Serialize)]
struct Table {
    #[serde(flatten)]
    about: About,
    rows: Vec<Row>,
    skipped: Vec<Skipped>,
}

/// What is measured.
#[derive(Clone, Serialize)]
struct About {
    model: String,
    device: String,
    threads: usize,
    /// Everything from the command's start to a model that is ready.
    load_seconds: f64,
    /// Of that, bringing the weights to where they are.
    weights_seconds: f64,
}

#[derive(Serialize)]
struct Row {
    shape: String,
    name: String,
    tokens_per_second_median: f64,
    tokens_per_second_best: f64,
    /// Of a decode step, or of a whole prompt; the median of all rounds.
    seconds_median: f64,
    /// Of the slowest hundredth of decode steps, or the slowest prompt.
    seconds_p99: f64,
    /// For how long the device stood still before a decode step; the median, where it knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_seconds_median: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    beside: Option<Beside>,
}

/// A row beside what the machine could do at the same moments: the floor of each sample, see [`floor`].
#[derive(Serialize)]
struct Beside {
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    floor: Option<Fractions>,
    /// The median.
    read_bytes_per_second: f64,
}

#[derive(Serialize)]
struct Fractions {
    /// The median floor.
    floor_tokens_per_second: f64,
    /// Of the floors, of each sample its own.
    fraction_of_floor_median: f64,
    fraction_of_floor_best: f64,
}

/// A shape that was not measured.
#[derive(Serialize)]
struct Skipped {
    shape: String,
    why: String,
}

/// How the result is printed.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    Table,
    Json,
}

/// Runs the command.
pub(crate) fn engine(args: &EngineBenchArgs) -> anyhow::Result<()> {
    let from = Instant::now();
    let loaded = model::load(&args.model, &args.engine)?;
    let load_seconds = from.elapsed().as_secs_f64();
    let room = Room::of(&loaded, args)?;
    let asked: Vec<Shape> = match (
        args.shapes.as_slice(),
        args.engine.device.pick((false, true)),
    ) {
        ([], false) => SHAPES.to_vec(),
        ([], true) => SHAPES_GPU.to_vec(),
        (shapes, _) => shapes.to_vec(),
    };
    let (shapes, skipped) = room.sort_out(asked);
    let limits = match args.stdin {
        true => room.whole(),
        false => room.for_shapes(&shapes)?,
    };
    let threads = args.engine.threads();
    let ceilings = loaded
        .products()
        .map(|products| Ceilings::new(products, threads, loaded.shape()))
        .transpose()?;
    let sole = WorkerThreads {
        index: 0,
        count: threads,
    };
    let bench = Bench::new(loaded.engine(limits, sole, GpuPart::WHOLE)?);
    let about = About {
        model: loaded.title(),
        device: bench.engine().describe().device.clone(),
        threads,
        load_seconds,
        weights_seconds: loaded.weights_time.as_secs_f64(),
    };
    let mut bench = Measured { bench, ceilings };
    if args.stdin {
        return answer(bench, &room, &about, args.rounds);
    }
    let table = Table {
        about,
        rows: measure(&mut bench, &shapes, args.rounds)?,
        skipped,
    };
    print(&table, if args.json { Form::Json } else { Form::Table })
}

/// An engine, and the machine that it runs on, where its ceilings can be measured.
struct Measured {
    bench: Bench,
    ceilings: Option<Ceilings>,
}

impl Measured {
    fn sample(&mut self, shape: Shape) -> anyhow::Result<(Sampled, Option<Floor>)> {
        let Some(ceilings) = &self.ceilings else {
            return Ok((self.bench.sample(shape)?, None));
        };
        let before = ceilings.now();
        let sample = self.bench.sample(shape)?;
        let floor = ceilings.floor(&sample, before, ceilings.now());
        Ok((sample, Some(floor)))
    }
}

/// Rounds of every shape in turn, so that a disturbance does not fall on one shape alone.
fn measure(bench: &mut Measured, shapes: &[Shape], rounds: u32) -> anyhow::Result<Vec<Row>> {
    let mut samples: Vec<Vec<(Sampled, Option<Floor>)>> =
        shapes.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (shape, samples) in shapes.iter().zip(&mut samples) {
            samples.push(bench.sample(*shape)?);
        }
    }
    let rows = shapes.iter().zip(&samples);
    Ok(rows
        .map(|(shape, samples)| Row::of(*shape, samples))
        .collect())
}

/// Measures what comes in, a shape a line, and answers each with a line of JSON.
fn answer(mut bench: Measured, room: &Room, about: &About, rounds: u32) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut say = |line: String| {
        writeln!(out, "{line}")?;
        out.flush()
    };
    say(serde_json::to_string(about)?)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        // Who mistypes a line keeps the engine, which may have taken a while to load.
        let shape = line.trim().parse::<Shape>().and_then(|shape| {
            let why = room.why_not(shape);
            why.map_or(Ok(shape), Err)
        });
        let shape = match shape {
            Ok(shape) => shape,
            Err(why) => {
                let shape = line.trim().to_owned();
                say(serde_json::to_string(&Skipped { shape, why })?)?;
                continue;
            }
        };
        let samples: Result<Vec<_>, _> = (0..rounds).map(|_| bench.sample(shape)).collect();
        say(serde_json::to_string(&Row::of(shape, &samples?))?)?;
    }
    Ok(())
}

/// What an engine can hold.
struct Room {
    context_tokens: u32,
    block_tokens: u32,
    block_bytes: u64,
    kv_bytes: u64,
    step_tokens_max: u32,
    /// Of an engine that is made before its shapes are known; any other has as many as they need.
    slots_count: Option<u32>,
}

impl Room {
    fn of(loaded: &Loaded, args: &EngineBenchArgs) -> anyhow::Result<Self> {
        let slots_count = args.stdin.then(|| args.engine.slots_count());
        let args = &args.engine;
        Ok(Self {
            slots_count,
            context_tokens: loaded.context_tokens_max(),
            block_tokens: args.block_tokens(),
            block_bytes: loaded.block_bytes(args.block_tokens()),
            kv_bytes: loaded.kv_bytes(args, 1)?,
            step_tokens_max: args.step_tokens_max(),
        })
    }

    fn blocks(&self, shape: Shape) -> u64 {
        let each = sequence_tokens(shape).div_ceil(self.block_tokens);
        u64::from(shape.sequences()) * u64::from(each)
    }

    /// Why a shape cannot be measured, if it cannot.
    fn why_not(&self, shape: Shape) -> Option<String> {
        const GIB: f64 = (1u64 << 30) as f64;
        let tokens = sequence_tokens(shape);
        if tokens > self.context_tokens {
            return Some(format!(
                "the model's context is {} tokens",
                self.context_tokens
            ));
        }
        if shape.sequences() > self.step_tokens_max {
            return Some(format!(
                "a step has {} tokens at most",
                self.step_tokens_max
            ));
        }
        if let Some(slots) = self.slots_count.filter(|slots| shape.sequences() > *slots) {
            return Some(format!(
                "the engine has {slots} slots; raise --max-num-seqs"
            ));
        }
        let bytes = self.blocks(shape) * self.block_bytes;
        (bytes > self.kv_bytes).then(|| {
            let (needed, has) = (bytes as f64 / GIB, self.kv_bytes as f64 / GIB);
            format!("it takes {needed:.1} GiB of KV cache, and there are {has:.1}")
        })
    }

    fn sort_out(&self, shapes: Vec<Shape>) -> (Vec<Shape>, Vec<Skipped>) {
        let (mut fit, mut skipped) = (Vec::new(), Vec::new());
        for shape in shapes {
            match self.why_not(shape) {
                None => fit.push(shape),
                Some(why) => skipped.push(Skipped {
                    shape: shape.to_string(),
                    why,
                }),
            }
        }
        (fit, skipped)
    }

    /// No more than the largest of these shapes needs.
    fn for_shapes(&self, shapes: &[Shape]) -> anyhow::Result<EngineLimits> {
        let blocks = shapes.iter().map(|shape| self.blocks(*shape)).max();
        let slots = shapes.iter().map(|shape| shape.sequences()).max();
        let (Some(blocks), Some(slots)) = (blocks, slots) else {
            bail!("none of the shapes fits the model's context and the KV cache");
        };
        Ok(self.limits(blocks, slots))
    }

    /// Everything there is, for shapes that are not yet known.
    fn whole(&self) -> EngineLimits {
        self.limits(
            self.kv_bytes / self.block_bytes,
            self.slots_count.unwrap_or(1),
        )
    }

    fn limits(&self, blocks: u64, slots_count: u32) -> EngineLimits {
        EngineLimits {
            block_tokens: self.block_tokens,
            blocks_count: u32::try_from(blocks).unwrap_or(u32::MAX),
            slots_count,
            step_tokens_max: self.step_tokens_max,
        }
    }
}

impl Row {
    fn of(shape: Shape, samples: &[(Sampled, Option<Floor>)]) -> Self {
        let timed = || samples.iter().map(|(sample, _)| sample);
        let speeds = sorted(timed().map(Sampled::tokens_per_second));
        let seconds = sorted(timed().flat_map(|s| s.seconds.clone()));
        let idle = sorted(timed().flat_map(|s| s.idle_seconds.clone()));
        Self {
            shape: shape.to_string(),
            name: shape.name(),
            tokens_per_second_median: at(&speeds, 50),
            tokens_per_second_best: at(&speeds, 100),
            seconds_median: at(&seconds, 50),
            seconds_p99: at(&seconds, 99),
            idle_seconds_median: (!idle.is_empty()).then(|| at(&idle, 50)),
            beside: Beside::of(samples),
        }
    }
}

impl Beside {
    fn of(samples: &[(Sampled, Option<Floor>)]) -> Option<Self> {
        let floors = samples
            .iter()
            .map(|(sample, floor)| Some((sample, floor.as_ref()?)));
        let floors: Vec<_> = floors.collect::<Option<_>>()?;
        let reads = sorted(floors.iter().map(|(_, floor)| floor.bytes_per_second));
        let known = floors
            .iter()
            .map(|(sample, floor)| Some((sample.tokens_per_second(), floor.tokens_per_second?)));
        let known: Option<Vec<(f64, f64)>> = known.collect();
        Some(Self {
            floor: known.map(|speeds| Fractions::of(&speeds)),
            read_bytes_per_second: at(&reads, 50),
        })
    }
}

impl Fractions {
    /// Of speeds, each beside its floor.
    fn of(speeds: &[(f64, f64)]) -> Self {
        let fractions = sorted(speeds.iter().map(|(speed, floor)| speed / floor));
        let floors = sorted(speeds.iter().map(|(_, floor)| *floor));
        Self {
            floor_tokens_per_second: at(&floors, 50),
            fraction_of_floor_median: at(&fractions, 50),
            fraction_of_floor_best: at(&fractions, 100),
        }
    }
}

fn sorted(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers
}

/// So many hundredths of the way through sorted numbers; 0 if there is none.
fn at(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or_default()
}

fn print(table: &Table, form: Form) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let Form::Json = form {
        writeln!(out, "{}", serde_json::to_string(table)?)?;
        return Ok(());
    }
    let About {
        model,
        device,
        load_seconds,
        ..
    } = &table.about;
    writeln!(out, "{model}, {device}, loaded in {load_seconds:.2} s\n")?;
    let beside = table.rows.iter().any(|row| row.beside.is_some());
    let (heads, rule) = match beside {
        true => (
            " floor | of it, median | best | read, GB/s |",
            "---|---|---|---|",
        ),
        false => ("", ""),
    };
    writeln!(
        out,
        "| | tokens/s, median | best |{heads}\n|---|---|---|{rule}"
    )?;
    for row in &table.rows {
        let (median, best) = (row.tokens_per_second_median, row.tokens_per_second_best);
        write!(out, "| {} | {median:.1} | {best:.1} |", row.name)?;
        if let Some(beside) = &row.beside {
            match &beside.floor {
                Some(floor) => write!(
                    out,
                    " {:.1} | {:.2} | {:.2} |",
                    floor.floor_tokens_per_second,
                    floor.fraction_of_floor_median,
                    floor.fraction_of_floor_best,
                )?,
                None => write!(out, " not known | | |")?,
            }
            write!(out, " {:.1} |", beside.read_bytes_per_second / 1e9)?;
        }
        writeln!(out)?;
    }
    for Skipped { shape, why } in &table.skipped {
        writeln!(out, "\n{shape} was not measured: {why}")?;
    }
    Ok(())
}
