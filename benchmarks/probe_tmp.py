import sys, json, time, os, collections
sys.path.insert(0, os.path.dirname(__file__))
import torch, gemini_strategy as gs
from models import *
import models, inspect
import argparse
ap=argparse.ArgumentParser(); ap.add_argument("--layers",type=int,default=16); ap.add_argument("--seqs",type=int,default=16); ap.add_argument("--budget",default="24GB"); ap.add_argument("--clip",type=int,default=0); ap.add_argument("--steps",type=int,default=8); ap.add_argument("--micro",type=int,default=1); ap.add_argument("--chunk",default=None); ap.add_argument("--policy",default="auto"); ap.add_argument("--out",default=None)
a=ap.parse_args()
from transformers import OPTConfig, OPTForCausalLM
torch.manual_seed(0)
cfg=OPTConfig(vocab_size=50272,hidden_size=4096,word_embed_proj_dim=4096,ffn_dim=16384,num_hidden_layers=a.layers,num_attention_heads=32,max_position_embeddings=2048,dropout=0.0,attention_dropout=0.0,activation_dropout=0.0)
cfg._attn_implementation="sdpa"
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    import torch.nn.init as I
    model=OPTForCausalLM(cfg)
torch.set_default_dtype(torch.float32)
model=model.cpu(); torch.cuda.empty_cache()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant":False}); model.config.use_cache=False
model.train()
opt=torch.optim.AdamW(model.parameters(),lr=1e-4)
import cProfile,pstats
pr=cProfile.Profile(); pr.enable()
t=time.time()
e=gs.manage(model,opt,device_budget=a.budget,placement_policy=a.policy,precision="bf16-true",chunk_size=a.chunk)
pr.disable()
if not a.clip: pstats.Stats(pr).sort_stats("tottime").print_stats(7)
print("manage",time.time()-t, dict(zip(gs.rates.REFERENCE if hasattr(gs,'rates') else range(9), ["%.3g"%x for x in e._settings.rates])))
g=torch.Generator(device="cuda").manual_seed(1)
def show(tag):
    s=e.stats(); 
    p=e.core.plan_info()
    print(tag, {k:s[k] for k in s if k in("plans","plan_breaks","deviations","replay_waits","traces","device_bytes","outside_peak_bytes","host_adam_seconds","fetched_bytes","evicted_bytes")})
    if p: print({k:(round(v,4) if isinstance(v,float) else v) for k,v in p.items() if k not in("classes",)})
ev=[torch.cuda.Event(enable_timing=True) for _ in range(a.steps+1)]
for s in range(a.steps):
    ev[s].record()
    rec = a.out and s==a.steps-2
    if rec: e.core.timeline_begin(60000)
    t0=time.time()
    for m in range(a.micro):
        ids=torch.randint(0,50272,(a.seqs,1024),device="cuda",generator=g)
        loss=model(input_ids=ids,labels=ids).loss
        tf=time.time()
        e.backward(loss/a.micro, step=(not a.clip and m==a.micro-1))
    tb=time.time()
    if a.clip: e.clip_grad_norm_(1.0)
    tc=time.time()
    opt.step(); opt.zero_grad()
    ts=time.time()
    print(s, "host fwd %.3f bwd %.3f clip %.3f step %.3f"%(tf-t0,tb-tf,tc-tb,ts-tc), "pool", e._memory._pool.bytes()/1e9, "alloc peak", torch.cuda.max_memory_allocated()/1e9)
    if s in(0,2): show("after %d"%s)
ev[-1].record(); torch.cuda.synchronize()
print("step seconds", [round(ev[i].elapsed_time(ev[i+1])/1e3,3) for i in range(a.steps)])
show("end")
if a.out:
    L=e.core.timeline_end()
    json.dump(L, open(a.out,"w"))
    by=collections.defaultdict(lambda:[0,0,0.0,1e9,0])
    for x in L:
        if x["kind"] in("tick","held","dropped"): continue
        k=(x["kind"],x["stream"]); b=by[k]; b[0]+=1; b[1]+=x["bytes"]; b[2]+=x["end"]-x["start"]; b[3]=min(b[3],x["start"]); b[4]=max(b[4],x["end"])
    for k,b in sorted(by.items()): print(k, "n",b[0],"GB %.2f"%(b[1]/1e9),"busy %.3f"%b[2],"from %.3f to %.3f"%(b[3],b[4]),"rate %.1f"%(b[1]/1e9/max(b[2],1e-9)))
