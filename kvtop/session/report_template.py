"""The page around a report: readable on a phone, printable, nothing fetched."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --fg: #1c1c1c; --dim: #626262; --line: #d0d0d0; --bg: #fff;
  --panel: #f5f5f5; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e4e4; --dim: #9e9e9e; --line: #3a3a3a;
  --bg: #121212; --panel: #1c1c1c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: var(--fg); background: var(--bg);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.flame svg { width: 1200px; background: #fff; }
.note, .tick { color: var(--dim); fill: var(--dim); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; min-width: 5.5rem; }
th { overflow-wrap: normal; } tr > :first-child { min-width: 8rem; }
figure { margin: 1rem 0; padding: .5rem; background: var(--panel); border-radius: .4rem; }
figcaption { font-size: .85rem; } svg { width: 100%; height: auto; display: block; }
.tick { font: 13px system-ui, sans-serif; }
@media (max-width: 600px) { .tick { font-size: 20px; } h1 { font-size: 1.2rem; } }
.grid { stroke: var(--line); }
.key { display: inline-block; margin-left: .6rem; }
.key i { display: inline-block; width: .7rem; height: .7rem; margin-right: .25rem;
  border-radius: 2px; }
.finding { border-left: .3rem solid var(--dim); padding: .1rem .8rem; margin: .8rem 0;
  background: var(--panel); }
.critical { border-color: #d70000; } .warning { border-color: #d7af00; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
@BODY@
</body>
</html>
"""
"""`@TITLE@` and `@BODY@` are replaced; both are escaped before."""
