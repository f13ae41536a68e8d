"""Features learnt from no data: random characters, and the frozen nets and the whitening made from them.

``python -m murmurfl.app.papers.strokes`` makes ``app/data/features/weights`` again. Nothing else imports this room:
runs read those files.
"""
