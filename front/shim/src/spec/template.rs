//! Sandboxes that begin with a template: a machine of the node's that has booted.

use slipway_sandbox_api::v1;

/// The annotation that names the template.
pub const TEMPLATE: &str = "dev.slipway.template";
/// The name for the template that the node makes by itself, of the machine that is asked for.
pub const AUTO: &str = "auto";

/// Has a sandbox begin with a template, whose machine it gets. What it asks for of a machine is the
/// least that the template must have.
///
/// # Errors
/// One line: the template's machine is smaller, or has what no sandbox of the shim's has.
pub fn begin_with(run: &mut v1::RunSpec, template: &v1::Template) -> Result<(), String> {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let v1::Template { name, memory_bytes, max_memory_bytes, cpus, max_cpus, .. } = template;
    let most = *max_memory_bytes.max(memory_bytes);
    let lacks = if template.bound_memory_bytes > 0 {
        let why = "memory of containers, and no sandbox of containerd's has such memory";
        Some(format!("{why}: make it without --bind-memory"))
    } else if run.memory_bytes > *memory_bytes {
        let (has, needs) = (mib(*memory_bytes), mib(run.memory_bytes));
        Some(format!("{has} MiB of memory, and {needs} are needed: make it with --memory {needs}M"))
    } else if run.max_memory_bytes > most {
        let (has, needs) = (mib(most), mib(run.max_memory_bytes));
        Some(format!("{has} MiB at most, and {needs} may be: make it with --max-memory {needs}M"))
    } else if run.cpus > *cpus {
        Some(format!("{cpus} CPUs, and {0} are needed: make it with --cpus {0}", run.cpus))
    } else if run.max_cpus > *max_cpus {
        let most = run.max_cpus;
        Some(format!("{max_cpus} CPUs at most, and {most} may be: make it with --max-cpus {most}"))
    } else {
        None
    };
    if let Some(lacks) = lacks {
        return Err(format!("the template {name} has {lacks}"));
    }
    (run.memory_bytes, run.cpus, run.max_cpus) = (*memory_bytes, *cpus, *max_cpus);
    run.max_memory_bytes = if most > *memory_bytes { most } else { 0 };
    run.template.clone_from(name);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_gets_the_templates_machine_or_an_error_that_says_what_it_lacks() {
        let template = v1::Template {
            name: "web".to_owned(),
            memory_bytes: 512 << 20,
            cpus: 2,
            max_cpus: 4,
            ..Default::default()
        };
        let begin = |memory_bytes: u64, cpus, max_cpus| {
            let mut run = v1::RunSpec { memory_bytes, cpus, max_cpus, ..Default::default() };
            begin_with(&mut run, &template).map(|()| run)
        };
        for (memory, cpus) in [(0, 0), (256 << 20, 1), (512 << 20, 2)] {
            let run = begin(memory, cpus, 0).unwrap();
            let machine = (run.memory_bytes, run.cpus, run.max_cpus);
            assert_eq!((run.template.as_str(), machine), ("web", (512 << 20, 2, 4)));
        }
        let grows = v1::Template { max_memory_bytes: 768 << 20, ..template.clone() };
        let with_most = |template: &v1::Template, most_mib: u64| {
            let most = most_mib << 20;
            let mut run = v1::RunSpec { max_memory_bytes: most, ..Default::default() };
            begin_with(&mut run, template).map(|()| run.max_memory_bytes >> 20)
        };
        for (template, asked, given) in
            [(&template, 0, 0), (&template, 512, 0), (&grows, 0, 768), (&grows, 600, 768)]
        {
            assert_eq!(with_most(template, asked), Ok(given));
        }
        let error = with_most(&grows, 769).unwrap_err();
        assert!(error.ends_with("769 may be: make it with --max-memory 769M"), "{error}");
        let binds = v1::Template { bound_memory_bytes: 124 << 20, ..template.clone() };
        let error = begin_with(&mut v1::RunSpec::default(), &binds).unwrap_err();
        assert!(error.ends_with("make it without --bind-memory"), "{error}");
        for (asked, advice) in [
            (
                (640 << 20, 0, 0),
                "has 512 MiB of memory, and 640 are needed: make it with --memory 640M",
            ),
            ((0, 3, 0), "has 2 CPUs, and 3 are needed: make it with --cpus 3"),
            ((0, 2, 8), "4 CPUs at most, and 8 may be: make it with --max-cpus 8"),
        ] {
            let error = begin(asked.0, asked.1, asked.2).unwrap_err();
            assert!(error.starts_with("the template web") && error.ends_with(advice), "{error}");
        }
    }
}
