//! `cleave bench engine`: the speed of an engine alone.
//!
//! Owns: the order of the measured shapes, and the output. Never: takes part in serving.

mod floor;
mod sample;
mod shape;

pub(crate) use floor::ProcessorProducts;
pub(crate) use shape::BenchShape;

use crate::args::EngineBenchArgs;
use crate::gpu::GpuShare;
use crate::model::{self, LoadedModel, ProcessWorkers};
use anyhow::bail;
use cleave_cpu::WorkerThreads;
use cleave_engine::EngineLimits;
use floor::{CeilingMeter, SampleFloor};
use sample::{BenchSample, EngineBench, sequence_tokens};
use serde::Serialize;
use shape::{SHAPES, SHAPES_GPU};
use std::io::{BufRead, Write};
use std::time::Instant;

#[derive(Serialize)]
struct EngineTable {
    #[serde(flatten)]
    about: BenchSubject,
    rows: Vec<ShapeRow>,
    skipped: Vec<SkippedShape>,
}

/// The subject of the measurement.
#[derive(Clone, Serialize)]
struct BenchSubject {
    model: String,
    device: String,
    threads: usize,
    /// Time from the command's start until the model is ready.
    load_seconds: f64,
    /// Time of loading the weights, which is a part of it.
    weights_seconds: f64,
}

#[derive(Serialize)]
struct ShapeRow {
    shape: String,
    name: String,
    tokens_per_second_median: f64,
    tokens_per_second_best: f64,
    /// Time of a decode step, or of a whole prompt; median of all rounds.
    seconds_median: f64,
    /// Time of the slowest hundredth of decode steps, or of the slowest prompt.
    seconds_p99: f64,
    /// Median idle time of the device before a decode step, if the engine reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_seconds_median: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    beside: Option<FloorComparison>,
}

/// A row compared with the machine's ceilings at the same moments: see [`floor`].
#[derive(Serialize)]
struct FloorComparison {
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    floor: Option<FloorFractions>,
    /// Median rate of reads.
    read_bytes_per_second: f64,
}

#[derive(Serialize)]
struct FloorFractions {
    /// Median of the floors.
    floor_tokens_per_second: f64,
    /// Speed of each sample as a fraction of its own floor.
    fraction_of_floor_median: f64,
    fraction_of_floor_best: f64,
}

#[derive(Serialize)]
struct SkippedShape {
    shape: String,
    why: String,
}

#[derive(Clone, Copy)]
pub(crate) enum PrintFormat {
    Table,
    Json,
}

pub(crate) fn engine(args: &EngineBenchArgs) -> anyhow::Result<()> {
    let from = Instant::now();
    let loaded = model::load(&args.model, &args.engine)?;
    let load_seconds = from.elapsed().as_secs_f64();
    let capacity = EngineCapacity::of(&loaded, args)?;
    let requested_shapes: Vec<BenchShape> =
        match (args.shapes.as_slice(), args.engine.device.pick(false, true)) {
            ([], false) => SHAPES.to_vec(),
            ([], true) => SHAPES_GPU.to_vec(),
            (shapes, _) => shapes.to_vec(),
        };
    let (shapes, skipped) = capacity.split_measurable(requested_shapes);
    let limits = if args.stdin {
        capacity.whole()
    } else {
        capacity.for_shapes(&shapes)?
    };
    let threads = args.engine.threads();
    let ceilings = loaded
        .products()
        .map(|products| CeilingMeter::new(products, threads, loaded.cost()))
        .transpose()?;
    let sole = WorkerThreads {
        index: 0,
        count: threads,
    };
    let bench = EngineBench::new(loaded.engine(limits, sole, GpuShare::WHOLE)?);
    let about = BenchSubject {
        model: loaded.title(),
        device: bench.engine().describe().device.clone(),
        threads,
        load_seconds,
        weights_seconds: loaded.weights_time.as_secs_f64(),
    };
    let mut bench = EngineMeter { bench, ceilings };
    if args.stdin {
        return answer_shapes(bench, &capacity, &about, args.rounds);
    }
    let table = EngineTable {
        about,
        rows: measure(&mut bench, &shapes, args.rounds)?,
        skipped,
    };
    print(
        &table,
        if args.json {
            PrintFormat::Json
        } else {
            PrintFormat::Table
        },
    )
}

/// An engine, with the ceilings of its machine where these can be measured.
struct EngineMeter {
    bench: EngineBench,
    ceilings: Option<CeilingMeter>,
}

impl EngineMeter {
    fn sample(&mut self, shape: BenchShape) -> anyhow::Result<(BenchSample, Option<SampleFloor>)> {
        let Some(ceilings) = &self.ceilings else {
            return Ok((self.bench.sample(shape)?, None));
        };
        let before = ceilings.measure();
        let sample = self.bench.sample(shape)?;
        let floor = ceilings.floor(&sample, before, ceilings.measure());
        Ok((sample, Some(floor)))
    }
}

/// Measures rounds of all shapes in turn, so that a disturbance does not affect one shape alone.
fn measure(
    bench: &mut EngineMeter,
    shapes: &[BenchShape],
    rounds: u32,
) -> anyhow::Result<Vec<ShapeRow>> {
    let mut samples: Vec<Vec<(BenchSample, Option<SampleFloor>)>> =
        shapes.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (shape, samples) in shapes.iter().zip(&mut samples) {
            samples.push(bench.sample(*shape)?);
        }
    }
    let rows = shapes.iter().zip(&samples);
    Ok(rows
        .map(|(shape, samples)| ShapeRow::of(*shape, samples))
        .collect())
}

/// Measures the shapes on standard input, one per line, and answers each with a line of JSON.
fn answer_shapes(
    mut bench: EngineMeter,
    capacity: &EngineCapacity,
    about: &BenchSubject,
    rounds: u32,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut write_line = |line: String| {
        writeln!(out, "{line}")?;
        out.flush()
    };
    write_line(serde_json::to_string(about)?)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        // An invalid line does not end the process, because loading the engine may have taken a
        // while.
        let shape = line.trim().parse::<BenchShape>().and_then(|shape| {
            let why = capacity.refusal(shape);
            why.map_or(Ok(shape), Err)
        });
        let shape = match shape {
            Ok(shape) => shape,
            Err(why) => {
                let shape = line.trim().to_owned();
                write_line(serde_json::to_string(&SkippedShape { shape, why })?)?;
                continue;
            }
        };
        let samples: Result<Vec<_>, _> = (0..rounds).map(|_| bench.sample(shape)).collect();
        write_line(serde_json::to_string(&ShapeRow::of(shape, &samples?))?)?;
    }
    Ok(())
}

/// Limits of what an engine can hold.
struct EngineCapacity {
    context_tokens: u32,
    block_tokens: u32,
    block_bytes: u64,
    kv_bytes: u64,
    step_tokens_max: u32,
    /// Slots of an engine that is made before its shapes are known; `None` for as many as the
    /// shapes need.
    slots_count: Option<u32>,
}

impl EngineCapacity {
    fn of(loaded: &LoadedModel, args: &EngineBenchArgs) -> anyhow::Result<Self> {
        let slots_count = args.stdin.then(|| args.engine.slots_count());
        let args = &args.engine;
        Ok(Self {
            slots_count,
            context_tokens: loaded.context_tokens_max(),
            block_tokens: args.block_tokens(),
            block_bytes: loaded.block_bytes(args.block_tokens()),
            kv_bytes: loaded.kv_bytes(args, ProcessWorkers::of(std::iter::once((args, 1))))?,
            step_tokens_max: args.step_tokens_max(),
        })
    }

    fn blocks(&self, shape: BenchShape) -> u64 {
        let each = sequence_tokens(shape).div_ceil(self.block_tokens);
        u64::from(shape.sequences()) * u64::from(each)
    }

    /// Returns the reason why a shape cannot be measured, if there is one.
    fn refusal(&self, shape: BenchShape) -> Option<String> {
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
            format!("it takes {needed:.1} GiB of KV cache, of {has:.1} GiB")
        })
    }

    fn split_measurable(&self, shapes: Vec<BenchShape>) -> (Vec<BenchShape>, Vec<SkippedShape>) {
        let (mut fit, mut skipped) = (Vec::new(), Vec::new());
        for shape in shapes {
            match self.refusal(shape) {
                None => fit.push(shape),
                Some(why) => skipped.push(SkippedShape {
                    shape: shape.to_string(),
                    why,
                }),
            }
        }
        (fit, skipped)
    }

    /// Returns the limits that the largest of these shapes needs.
    fn for_shapes(&self, shapes: &[BenchShape]) -> anyhow::Result<EngineLimits> {
        let blocks = shapes.iter().map(|shape| self.blocks(*shape)).max();
        let slots = shapes.iter().map(|shape| shape.sequences()).max();
        let (Some(blocks), Some(slots)) = (blocks, slots) else {
            bail!("none of the shapes fits the model's context and the KV cache");
        };
        Ok(self.limits(blocks, slots))
    }

    /// Returns the limits of the whole memory, for shapes that are not yet known.
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
            states_count: 0,
            slots_count,
            step_tokens_max: self.step_tokens_max,
            windows_count: 0,
        }
    }
}

impl ShapeRow {
    fn of(shape: BenchShape, samples: &[(BenchSample, Option<SampleFloor>)]) -> Self {
        let timed = || samples.iter().map(|(sample, _)| sample);
        let speeds = sorted(timed().map(BenchSample::tokens_per_second));
        let seconds = sorted(timed().flat_map(|s| s.seconds.clone()));
        let idle = sorted(timed().flat_map(|s| s.idle_seconds.clone()));
        Self {
            shape: shape.to_string(),
            name: shape.name(),
            tokens_per_second_median: percentile(&speeds, 50),
            tokens_per_second_best: percentile(&speeds, 100),
            seconds_median: percentile(&seconds, 50),
            seconds_p99: percentile(&seconds, 99),
            idle_seconds_median: (!idle.is_empty()).then(|| percentile(&idle, 50)),
            beside: FloorComparison::of(samples),
        }
    }
}

impl FloorComparison {
    fn of(samples: &[(BenchSample, Option<SampleFloor>)]) -> Option<Self> {
        let floors = samples
            .iter()
            .map(|(sample, floor)| Some((sample, floor.as_ref()?)));
        let floors: Vec<_> = floors.collect::<Option<_>>()?;
        let reads = sorted(floors.iter().map(|(_, floor)| floor.bytes_per_second));
        let speeds = floors
            .iter()
            .map(|(sample, floor)| Some((sample.tokens_per_second(), floor.tokens_per_second?)));
        let speeds: Option<Vec<(f64, f64)>> = speeds.collect();
        Some(Self {
            floor: speeds.map(|speeds| FloorFractions::of(&speeds)),
            read_bytes_per_second: percentile(&reads, 50),
        })
    }
}

impl FloorFractions {
    /// Computes the fractions of pairs of speed and floor.
    fn of(speeds: &[(f64, f64)]) -> Self {
        let fractions = sorted(speeds.iter().map(|(speed, floor)| speed / floor));
        let floors = sorted(speeds.iter().map(|(_, floor)| *floor));
        Self {
            floor_tokens_per_second: percentile(&floors, 50),
            fraction_of_floor_median: percentile(&fractions, 50),
            fraction_of_floor_best: percentile(&fractions, 100),
        }
    }
}

fn sorted(numbers: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers
}

/// Returns a percentile of sorted numbers; 0 if there are none.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or_default()
}

fn print(table: &EngineTable, form: PrintFormat) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let PrintFormat::Json = form {
        writeln!(out, "{}", serde_json::to_string(table)?)?;
        return Ok(());
    }
    let BenchSubject {
        model,
        device,
        load_seconds,
        ..
    } = &table.about;
    writeln!(out, "{model}, {device}, loaded in {load_seconds:.2} s\n")?;
    let beside = table.rows.iter().any(|row| row.beside.is_some());
    let (heads, rule) = if beside {
        (
            " floor | of it, median | best | read, GB/s |",
            "---|---|---|---|",
        )
    } else {
        ("", "")
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
    for SkippedShape { shape, why } in &table.skipped {
        writeln!(out, "\n{shape} was not measured: {why}")?;
    }
    Ok(())
}
